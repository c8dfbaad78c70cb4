// The operators between two linear operators, written for a CPU. native.py compiles this file, and says why it exists.
// First comes attention over the KV cache, with one loop for each kind of work in a hybrid batch:
//
//   decode   one row of a request. Memory is the bound: K and V are read once, in place. A core takes a key head of a request. So if there
//            is one request with one key head, all other cores are idle.
//   chunk    many rows of one request. Arithmetic is the bound. Scores never leave a core's own cache (online softmax, as in FlashAttention).
//   beams    one row for each beam of a search. This is a decode whose rows share a prompt: its keys are read once for all beams.
//
// Then come the small operators: normalize, rotate, gate. Each reads its rows once and writes them once. Last comes `step`: a whole iteration
// of a few decodes, all layers in one parallel region.
//
// The vector types are GCC's and Clang's (`vector_size`). So this compiles for any CPU. Three AVX-512 instructions are called by name. No
// compiler finds two of them: the dot product of bfloat16 pairs, and the rounding to bfloat16. The third widens 16 bits: GCC 12 is slow at it.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <omp.h>
#include <thread>
#include <utility>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

// The vector registers of the CPU that we compile for: how many, and how many floats each holds.
#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif
constexpr int MAX_HEAD_DIM = 256, MAX_GROUPS = 64;
constexpr int KEYS = 64;  // of one step of a chunk: their scores stay in the nearest cache
// Registers hold the sums of TILE keys (or channels) by WIDE * LANES rows. Some are left for what is added: with 16, 4 x 3 sums leave 4.
constexpr int TILE = 4, WIDE = REGISTERS == 32 ? 4 : 3, HALF = (WIDE + 1) / 2;
constexpr int AHEAD = 16;  // keys: a key is fetched from memory while the 16 before it are used
constexpr int SIDE = REGISTERS / 8;  // vectors of channels that TILE rows of beams sum at once
constexpr float INFINITE = __builtin_inff();

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));  // words: each lane has 32 bits, which are a float or two bfloat16
#if !defined(__clang__) && __GNUC__ < 12
#define __builtin_shufflevector(a, b, ...) __builtin_shuffle(a, b, ints{__VA_ARGS__})  // GCC's older name for it
#endif
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint16_t bf16;
typedef uint32_t word __attribute__((may_alias));  // one of its lanes

template <int... I> constexpr ints counted(std::integer_sequence<int, I...>) { return ints{I...}; }
constexpr auto EACH_LANE = std::make_integer_sequence<int, LANES>{};
constexpr ints ORDER = counted(EACH_LANE);  // 0, 1, 2, ...

template <class T> constexpr int PER = 4 / sizeof(T);  // values in a word

template <class V> inline V load(const void* from) { V v; std::memcpy(&v, from, sizeof v); return v; }
template <class V> inline void store(void* to, V v) { std::memcpy(to, &v, sizeof v); }

inline vec maximum(vec a, vec b) { return a > b ? a : b; }

// 2^x for x <= 126, to 1e-7 of its value: 2^n times a polynomial on [-0.5, 0.5]. 0 below 2^-126.
inline vec power_of_two(vec x) {
    vec n = (x + 12582912.0f) - 12582912.0f, f = x - n;  // adding 1.5 * 2^23 rounds to an integer
    vec p = ((((1.32186725e-3f * f + 9.67169794e-3f) * f + 5.55089295e-2f) * f + 2.40222380e-1f) * f + 6.93146856e-1f) * f + 1.0f;
    vec scaled = (vec)((bits)p + ((bits)__builtin_convertvector(n, ints) << 23));  // unsigned: far below -126 it wraps around, but is not used then
    return x < -126.0f ? vec{} : scaled;  // with this order of the two results, NaN stays NaN
}

// sums + a * b, word by word. A word of bfloat16 adds two products, one for each half.
template <class T> inline vec dot(vec sums, bits a, bits b);
template <> inline vec dot<float>(vec sums, bits a, bits b) { return sums + (vec)a * (vec)b; }
template <> inline vec dot<bf16>(vec sums, bits a, bits b) {
#ifdef __AVX512BF16__
    return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
    sums += (vec)(a << 16) * (vec)(b << 16);
    return sums + (vec)(a & 0xffff0000u) * (vec)(b & 0xffff0000u);
#endif
}

// A bfloat16 is the upper half of a float, rounded to the nearest, ties to even.
#ifdef __AVX512BF16__
inline bits low(halves x) { return (bits)_mm512_cvtepu16_epi32((__m256i)x); }
inline halves rounded(vec x) { return (halves)_mm512_cvtneps_pbh((__m512)x); }
#else
inline bits low(halves x) { return __builtin_convertvector(x, bits); }
inline halves rounded(vec x) {
    const bits b = (bits)x;
    return __builtin_convertvector((b + 0x7fff + ((b >> 16) & 1)) >> 16, halves);
}
#endif
inline vec widen(const bf16* from) { return (vec)(low(load<halves>(from)) << 16); }
inline vec widen(const float* from) { return load<vec>(from); }
inline void narrow(bf16* to, vec x) { store(to, rounded(x)); }
inline void narrow(float* to, vec x) { store(to, x); }

// Floats as words. float: a word is a lane of a. bfloat16: a word is a lane of a (lower half) and of b (upper half).
template <class T> inline bits words_of(vec a, vec b);
template <> inline bits words_of<float>(vec a, vec) { return (bits)a; }
template <> inline bits words_of<bf16>(vec a, vec b) { return low(rounded(a)) | (low(rounded(b)) << 16); }

// Two rows of values, arranged so that `dot` sums over the rows. bfloat16: `even` gets the even values of both rows, `odd` the odd ones.
template <class T> inline void weave(bits a, bits b, bits* even, bits* odd);
template <> inline void weave<float>(bits a, bits, bits* even, bits*) { *even = a; }
template <> inline void weave<bf16>(bits a, bits b, bits* even, bits* odd) {
    *even = (a & 0xffffu) | (b << 16);
    *odd = (a >> 16) | (b & 0xffff0000u);
}

inline float sum(vec x) { return std::accumulate((float*)&x, (float*)&x + LANES, 0.0f); }

template <int... I> inline vec add_pairs(vec a, vec b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
}

// The sum of each of N vectors, where N is a power of two. Neighbours are added in pairs, so that all lanes work at once.
template <int N> inline vec add_lanes(const vec* x) {
    return add_pairs(add_lanes<N / 2>(x), add_lanes<N / 2>(x + N / 2), EACH_LANE);
}
template <> inline vec add_lanes<1>(const vec* x) { return x[0]; }

// A request's new rows: rows `row` to row + rows - 1 of the batch. They are the last of its `context` tokens in the cache.
struct Request {
    int64_t row, rows, slot, context;
    int64_t block;         // tokens of a block of the cache; 0: all of its tokens are in one block, its slot
    const int64_t* table;  // its blocks, in their order
    int64_t begin;         // the first token that a decode sees: a window may hide those before
};

struct Sizes {
    int64_t n, n_head, n_kv_head, head_dim;  // n requests
    int64_t stride;                          // values from row to row of q, k and v; y has no gaps
    int64_t kv_head, kv_slot;                // of the cache: values from one head (slot, block) to the next
};

// Where tokens first, first + 1, ... of a request lie in the cache of a key head: at most KEYS of them, and none from `end` on. Returns how
// many. The last one is repeated until there is a multiple of LANES: after it come old values of other requests, maybe NaN.
inline int locate(const Request& r, const Sizes& s, int64_t first, int64_t end, int64_t* at) {
    const int64_t size = r.block ? r.block : INT64_MAX, *block = (r.block ? r.table : &r.slot) + first / size;
    const int count = std::min<int64_t>(KEYS, end - first);
    int64_t place = first % size;
    for (int j = 0; j < count;) {
        const int64_t from = *block++ * s.kv_slot + place * s.head_dim, run = std::min<int64_t>(size - place, count - j);
        for (int64_t i = 0; i < run; i++) at[j++] = from + i * s.head_dim;
        place = 0;
    }
    for (int j = count; j % LANES; j++) at[j] = at[count - 1];
    return count;
}

// Calls use(first, end, at, next) for tokens `first` to end - 1 of a request, all that it sees in turn: they lie side by side, from `at` on.
// The next ones begin at `next`. Blocks whose numbers follow each other count as one.
template <class F> inline void each_run(const Request& r, const Sizes& s, F use) {
    const int64_t size = r.block ? r.block : r.context, *table = r.block ? r.table : &r.slot, blocks = (r.context + size - 1) / size;
    for (int64_t from = r.begin / size, to; from < blocks; from = to) {
        for (to = from + 1; to < blocks && table[to] == table[to - 1] + 1;) to++;
        const int64_t first = std::max(from * size, r.begin), end = std::min(to * size, r.context);
        const int64_t at = table[from] * s.kv_slot + (first - from * size) * s.head_dim;
        use((int)first, (int)end, at, to < blocks ? table[to] * s.kv_slot : at);
    }
}

// Memory begins to load the first keys of the next run. From there on, the core itself sees which ones come.
template <class T> inline void fetch(const T* from, int head_dim) {
    for (int64_t c = 0; c < AHEAD * head_dim; c += 64 / (int)sizeof(T)) __builtin_prefetch(from + c);
}

// The new row of the query heads that share one key head: q (groups, head_dim), out as q. keys and values are those of the head, in all
// slots. scores: room for `groups` times `room` of them, at least context + LANES.
template <class T>
void decode(const T* q, const T* keys, const T* values, T* out, const Request& r, const Sizes& s, float scale, float* scores, int64_t room) {
    constexpr int P = PER<T>;
    const int groups = s.n_head / s.n_kv_head, seen = r.begin, context = r.context, words = s.head_dim / P, vectors = words / LANES;
    const word* query = (const word*)q;

    each_run(r, s, [&](int begin, int end, int64_t at, int64_t next) {
        const word* key = (const word*)(keys + at);
        fetch(keys + next, s.head_dim);
        for (int first = begin; first < end; first += LANES)
            for (int g = 0; g < groups; g++) {
                vec products[LANES];
                for (int j = 0; j < LANES; j++) {
                    const word* row = key + (int64_t)(std::min(first + j, end - 1) - begin) * words;
                    products[j] = vec{};
                    for (int c = 0; c < words; c += LANES)
                        products[j] = dot<T>(products[j], load<bits>(query + g * words + c), load<bits>(row + c));
                }
                vec score = add_lanes<LANES>(products) * scale;  // behind `end` come those of the next run, or nothing
                store(scores + g * room + first, ORDER + first < end ? score : vec{} - INFINITE);
            }
    });
    float total[MAX_GROUPS];
    for (int g = 0; g < groups; g++) {
        float* score = scores + g * room;
        store(score + context, vec{} - INFINITE);  // a run may end before whole lanes do
        float most = *std::max_element(score + seen, score + context);
        vec sums{};
        for (int j = seen; j < context; j += LANES) {
            vec weight = power_of_two(load<vec>(score + j) - most);
            sums += weight;
            store(score + j, weight);
        }
        total[g] = sum(sums);
    }
    vec y[MAX_GROUPS][P][MAX_HEAD_DIM / P / LANES];
    for (int g = 0; g < groups; g++) std::fill_n(&y[g][0][0], P * (MAX_HEAD_DIM / P / LANES), vec{});
    each_run(r, s, [&](int begin, int end, int64_t at, int64_t following) {
        const word* value = (const word*)(values + at);
        fetch(values + following, s.head_dim);
        for (int first = begin; first < end; first += KEYS)
            for (int g = 0; g < groups; g++)
                for (int j = first; j < std::min(first + KEYS, end); j += P) {
                    const bool pair = j + 1 < end;
                    const word *row = value + (int64_t)(j - begin) * words, *next = pair ? row + words : row;
                    const float* score = scores + g * room + j;
                    bits weight = words_of<T>(vec{} + score[0], vec{} + (pair ? score[1] : 0.0f)), woven[2];
                    for (int c = 0; c < vectors; c++) {
                        weave<T>(load<bits>(row + c * LANES), load<bits>(next + c * LANES), woven, woven + 1);
                        for (int p = 0; p < P; p++) y[g][p][c] = dot<T>(y[g][p][c], weight, woven[p]);
                    }
                }
    });
    for (int g = 0; g < groups; g++)
        for (int c = 0; c < vectors; c++)
            store((word*)out + g * words + c * LANES, words_of<T>(y[g][0][c] / total[g], y[g][P - 1][c] / total[g]));
}

// The new rows of one query head, at most V * LANES: each has a lane of its own. q and out (rows, head_dim), with q_stride and out_stride
// values from row to row; keys and values are those of the key head, in all slots. Row i is token start + i of the request. This takes up to
// 220 KB of stack.
template <class T, int V>
void chunk(const T* q, int64_t q_stride, const T* keys, const T* values, T* out, int64_t out_stride, int start, int rows, const Request& r,
           const Sizes& s, float scale) {
    constexpr int P = PER<T>;
    const int head_dim = s.head_dim, words = head_dim / P, end = start + rows;
    int64_t at[KEYS];
    alignas(64) word query[MAX_HEAD_DIM / P][V * LANES], woven[KEYS / P][MAX_HEAD_DIM];
    vec scores[KEYS][V], y[MAX_HEAD_DIM][V], most[V], total[V];
    bits weights[KEYS / P][V];

    for (int i = 0; i < V * LANES; i++)
        for (int c = 0; c < words; c++) query[c][i] = i < rows ? ((const word*)(q + i * q_stride))[c] : 0;
    for (int v = 0; v < V; v++) most[v] = vec{} - INFINITE, total[v] = vec{};
    for (int d = 0; d < head_dim; d++)
        for (int v = 0; v < V; v++) y[d][v] = vec{};

    for (int first = 0; first < end; first += KEYS) {
        const int count = locate(r, s, first, end, at), padded = (count + TILE - 1) / TILE * TILE;
        for (int j = 0; j < count; j += TILE) {  // scores = keys q
            const word* row[TILE];
            for (int t = 0; t < TILE; t++) row[t] = (const word*)(keys + at[j + t]);
            vec sums[TILE][V] = {};
            for (int c = 0; c < words; c++) {
                bits column[V];
                for (int v = 0; v < V; v++) column[v] = load<bits>(&query[c][v * LANES]);
                for (int t = 0; t < TILE; t++)
                    for (int v = 0; v < V; v++) sums[t][v] = dot<T>(sums[t][v], column[v], bits{} + row[t][c]);
            }
            for (int t = 0; t < TILE; t++)
                for (int v = 0; v < V; v++) {
                    vec score = sums[t][v] * scale;
                    if (first + j + t > start) score = ORDER + (start + v * LANES) >= first + j + t ? score : vec{} - INFINITE;
                    scores[j + t][v] = score;
                }
        }
        vec shrink[V];  // online softmax: what is summed so far shrinks when a greater score appears
        for (int v = 0; v < V; v++) {
            shrink[v] = most[v];
            for (int j = 0; j < padded; j++) most[v] = maximum(most[v], scores[j][v]);
            shrink[v] = power_of_two(shrink[v] - most[v]);
            total[v] *= shrink[v];
            for (int j = 0; j < padded; j++) total[v] += scores[j][v] = power_of_two(scores[j][v] - most[v]);
            for (int j = 0; j < padded; j += P) weights[j / P][v] = words_of<T>(scores[j][v], scores[j + P - 1][v]);
        }
        for (int j = 0; j < padded; j += P)
            for (int c = 0; c < words; c += LANES) {
                const word *row = (const word*)(values + at[j]), *next = (const word*)(values + at[j + P - 1]);
                bits pair[2];
                weave<T>(load<bits>(row + c), load<bits>(next + c), pair, pair + 1);
                for (int p = 0; p < P; p++) store(&woven[j / P][p * words + c], pair[p]);
            }
        for (int d = 0; d < head_dim; d += TILE) {  // y = y shrink + values weights
            vec sums[TILE][V];
            for (int t = 0; t < TILE; t++)
                for (int v = 0; v < V; v++) sums[t][v] = y[d + t][v] * shrink[v];
            for (int j = 0; j < padded / P; j++) {
                bits weight[V];
                for (int v = 0; v < V; v++) weight[v] = weights[j][v];
                for (int t = 0; t < TILE; t++)
                    for (int v = 0; v < V; v++) sums[t][v] = dot<T>(sums[t][v], weight[v], bits{} + woven[j][d + t]);
            }
            for (int t = 0; t < TILE; t++)
                for (int v = 0; v < V; v++) y[d + t][v] = sums[t][v];
        }
    }
    for (int c = 0; c < words; c++)
        for (int v = 0; v < V; v++)
            store(&query[c][v * LANES], words_of<T>(y[c][v] / total[v], y[(P - 1) * words + c][v] / total[v]));
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < words; c++) ((word*)(out + i * out_stride))[c] = query[c][i];
}

// Attention of a whole batch in one layer. q, y (T, n_head, head_dim), k, v (T, n_kv_head, head_dim). First, k and v are written to the
// cache; null means that the cache has them already.
template <class T>
void attend(const T* q, const T* k, const T* v, T* keys, T* values, T* y, const Request* requests, const Sizes& s) {
    const int groups = s.n_head / s.n_kv_head, block = WIDE * LANES;
    const float scale = 1.44269504f / __builtin_sqrtf(s.head_dim);  // scores are powers of 2, not of e
    struct Task {
        int64_t request, head, first;  // a key head of a decode; a query head of a chunk, for a block of rows
    };
    std::vector<Task> tasks;
    int64_t longest = 0, room = 0;
    for (int64_t i = 0; i < s.n; i++) {
        longest = std::max(longest, requests[i].rows);
        if (requests[i].rows == 1) room = std::max(room, requests[i].context + LANES);
    }
    for (int64_t first = (longest - 1) / block * block; first >= 0; first -= block)  // the longest tasks first: the last rows see most keys
        for (int64_t i = 0; i < s.n; i++)
            if (requests[i].rows > 1 && requests[i].rows > first)
                for (int64_t head = 0; head < s.n_head; head++) tasks.push_back({i, head, first});
    for (int64_t i = 0; i < s.n; i++)
        if (requests[i].rows == 1)
            for (int64_t head = 0; head < s.n_kv_head; head++) tasks.push_back({i, head, 0});

#pragma omp parallel
    {
        if (k) {
#pragma omp for
            for (int64_t task = 0; task < s.n * s.n_kv_head; task++) {
                const Request& r = requests[task % s.n];
                const int64_t head = task / s.n;
                int64_t at[KEYS];
                for (int64_t i = 0; i < r.rows; i++) {
                    if (i % KEYS == 0) locate(r, s, r.context - r.rows + i, r.context, at);
                    const int64_t from = (r.row + i) * s.stride + head * s.head_dim, to = head * s.kv_head + at[i % KEYS];
                    std::memcpy(keys + to, k + from, s.head_dim * sizeof(T));
                    std::memcpy(values + to, v + from, s.head_dim * sizeof(T));
                }
            }
        }
        std::vector<float> scores(groups * room);
#pragma omp for schedule(dynamic)
        for (size_t t = 0; t < tasks.size(); t++) {
            const auto [request, head, first] = tasks[t];
            const Request& r = requests[request];
            const int64_t row = r.row + first, q_head = r.rows == 1 ? head * groups : head, at = q_head / groups * s.kv_head;
            const T* query = q + row * s.stride + q_head * s.head_dim;
            T* out = y + (row * s.n_head + q_head) * s.head_dim;
            if (r.rows == 1) {
                decode(query, keys + at, values + at, out, r, s, scale, scores.data(), room);
                continue;
            }
            const int rows = std::min<int64_t>(block, r.rows - first), start = r.context - r.rows + first;
            auto run = rows > HALF * LANES ? chunk<T, WIDE> : rows > LANES ? chunk<T, HALF> : chunk<T, 1>;
            run(query, s.stride, keys + at, values + at, out, s.n_head * s.head_dim, start, rows, r, s, scale);
        }
    }
}

// The rows of one search that share a key head, all as floats. `split` sets the order of their channels.
struct Rows {
    float *q, *y;         // (rows, head_dim): q scaled, y not yet divided by the total
    float *most, *total;  // (rows,): the greatest score so far, and the sum of all weights
};

// Words as floats. float: one vector. bfloat16: two vectors, the even channels and the odd channels.
template <class T> inline void split(bits words, vec* parts);
template <> inline void split<float>(bits words, vec* parts) { parts[0] = (vec)words; }
template <> inline void split<bf16>(bits words, vec* parts) {
    parts[0] = (vec)(words << 16);
    parts[1] = (vec)(words & 0xffff0000u);
}

// The products of ROWS rows and COUNT keys; their lanes are not added yet. Those of row r begin at `products + r * COUNT`.
template <class T, int ROWS, int COUNT>
inline void multiply(const float* const* q, const T* const* key, int head_dim, vec* products) {
    constexpr int P = PER<T>;
    vec sums[ROWS][COUNT] = {};
    for (int c = 0; c < head_dim; c += P * LANES)
        for (int j = 0; j < COUNT; j++) {
            vec parts[P];
            split<T>(load<bits>(key[j] + c), parts);
            for (int p = 0; p < P; p++)
                for (int r = 0; r < ROWS; r++) sums[r][j] += parts[p] * load<vec>(q[r] + c + p * LANES);
        }
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < COUNT; j++) products[r * COUNT + j] = sums[r][j];
}

// y = y shrink + weights values, for ROWS rows and VECTORS * LANES channels. The weights of ACROSS keys are side by side for each row.
template <class T, int ROWS, int VECTORS, int ACROSS>
inline void weigh(float* const* y, const float* shrink, const float* weights, const T* const* value, int count, int channel) {
    vec sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = load<vec>(y[r] + channel + v * LANES) * shrink[r];
    for (int j = 0; j < count; j++) {
        const float* weight = weights + j / ACROSS * LANES + j % ACROSS;
        vec parts[VECTORS];
        for (int v = 0; v < VECTORS; v += PER<T>) split<T>(load<bits>(value[j] + channel + v * LANES), parts + v);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) sums[r][v] += parts[v] * weight[r * ACROSS];
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(y[r] + channel + v * LANES, sums[r][v]);
}

// Online softmax, as in `chunk`: adds `count` keys and their values (at most KEYS) to ROWS rows, the first of which is `first`. A vector of
// scores holds ACROSS keys for each row. If `rows` is less than ROWS, the last row is computed more than once. `key` and `value` have AHEAD
// pointers more than `count`: those of the next keys. With `fetch`, memory already loads these keys while the core computes.
template <class T, int ROWS>
void absorb(const Rows& all, int64_t first, int rows, const T* const* key, const T* const* value, int count, int head_dim, bool fetch) {
    constexpr int ACROSS = LANES / ROWS;
    const float* q[ROWS];
    float *y[ROWS], most[ROWS], shrink[ROWS], spread[LANES];
    int64_t own[ROWS];
    for (int r = 0; r < ROWS; r++) {
        own[r] = first + std::min(r, rows - 1);
        q[r] = all.q + own[r] * head_dim, y[r] = all.y + own[r] * head_dim;
    }
    vec scores[KEYS / ACROSS], greatest = vec{} - INFINITE, sums{};
    for (int j = 0; j < count; j += ACROSS) {
        if (fetch)
            for (int t = j + AHEAD; t < j + AHEAD + ACROSS; t++)
                for (int c = 0; c < head_dim; c += PER<T> * LANES) __builtin_prefetch(key[t] + c), __builtin_prefetch(value[t] + c);
        vec products[LANES];
        multiply<T, ROWS, ACROSS>(q, key + j, head_dim, products);
        const vec score = add_lanes<LANES>(products);
        scores[j / ACROSS] = ORDER % ACROSS < count - j ? score : vec{} - INFINITE;
        greatest = maximum(greatest, scores[j / ACROSS]);
    }
    for (int r = 0; r < ROWS; r++) {
        const float* lane = (const float*)&greatest + r * ACROSS;
        most[r] = std::max(all.most[own[r]], *std::max_element(lane, lane + ACROSS));
        std::fill_n(spread + r * ACROSS, ACROSS, most[r]);
    }
    for (int j = 0; j < count; j += ACROSS) sums += scores[j / ACROSS] = power_of_two(scores[j / ACROSS] - load<vec>(spread));
    for (int r = 0; r < ROWS; r++) spread[r] = all.most[own[r]] - most[r];
    const vec shrunk = power_of_two(load<vec>(spread));
    for (int r = 0; r < ROWS; r++) {
        const float* lane = (const float*)&sums + r * ACROSS;
        shrink[r] = shrunk[r];
        spread[r] = std::accumulate(lane, lane + ACROSS, all.total[own[r]] * shrink[r]);
    }
    for (int r = 0; r < ROWS; r++) all.most[own[r]] = most[r], all.total[own[r]] = spread[r];

    const float* weights = (const float*)scores;
    int c = 0;
    for (; c + SIDE * LANES <= head_dim; c += SIDE * LANES) weigh<T, ROWS, SIDE, ACROSS>(y, shrink, weights, value, count, c);
    if (c < head_dim) weigh<T, ROWS, 2, ACROSS>(y, shrink, weights, value, count, c);
}

// One search. It has new rows in the batch, its prompt in a slot of the cache, and its response in segments of (N_step, beams, n_kv_head,
// head_dim), one for each layer. The table is (beams, N_step): beam b reads the key of step t from place table[b][t].
struct Search {
    int64_t row, beams, slot, prompt, steps;  // steps of the response, the new one included
    int64_t layer, table_row;                 // values from one layer to the next, and from one row of the table
    void *keys, *values;
    const int64_t* table;
};

struct BeamSizes : Sizes {  // n searches
    int64_t kv_token;       // of the prompts: values from one token to the next
    int64_t layer;
};

// Attention of all searches in one layer. q, y (T, n_head, head_dim), k, v (T, n_kv_head, head_dim). First, k and v are written to the
// segments. A task is one key head of one search, and no other task reads what it writes. A core runs whole tasks. So if a search is alone
// and has fewer key heads than there are cores, some cores are idle. Cutting its prompt into parts would use them; we do not do that.
template <class T>
void attend_beams(const T* q, const T* k, const T* v, const T* keys, const T* values, T* y, const Search* searches, const BeamSizes& s) {
    constexpr int P = PER<T>;
    const int64_t groups = s.n_head / s.n_kv_head, d = s.head_dim;
    const float scale = 1.44269504f / __builtin_sqrtf(d);
    int64_t most = 0;
    for (int64_t i = 0; i < s.n; i++) most = std::max(most, searches[i].beams * groups);

#pragma omp parallel
    {
        std::vector<vec> room(most * (2 * d / LANES) + most * 2 / LANES + 1);  // of vectors, because these are aligned, which makes loads fast
        float* const start = (float*)room.data();
        const Rows all{start, start + most * d, start + 2 * most * d, start + 2 * most * d + most};
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < s.n * s.n_kv_head; task++) {
            const Search& search = searches[task / s.n_kv_head];
            const int64_t head = task % s.n_kv_head, rows = search.beams * groups, token = s.n_kv_head * d;
            T* const own_keys = (T*)search.keys + s.layer * search.layer + head * d;  // step t of place b is t * beams + b tokens further
            T* const own_values = (T*)search.values + s.layer * search.layer + head * d;
            for (int64_t b = 0; b < search.beams; b++) {
                const int64_t from = (search.row + b) * s.stride + head * d, to = ((search.steps - 1) * search.beams + b) * token;
                std::memcpy(own_keys + to, k + from, d * sizeof(T));
                std::memcpy(own_values + to, v + from, d * sizeof(T));
            }
            for (int64_t i = 0; i < rows; i++) {
                const T* from = q + (search.row + i / groups) * s.stride + (head * groups + i % groups) * d;
                for (int64_t c = 0; c < d; c += P * LANES) {
                    vec parts[P];
                    split<T>(load<bits>(from + c), parts);
                    for (int p = 0; p < P; p++) store(all.q + i * d + c + p * LANES, parts[p] * scale);
                }
            }
            std::fill_n(all.y, rows * d, 0.0f);
            std::fill_n(all.most, rows, -INFINITE);
            std::fill_n(all.total, rows, 0.0f);

            // Adds the keys and values of tokens 0 .. end - 1 to `rows` rows, the first of which is `first`. `place` says where a token lies.
            const auto absorb_all = [&](int64_t first, int64_t rows, int64_t end, const T* keys, const T* values, auto place) {
                const T *key[KEYS + AHEAD], *value[KEYS + AHEAD];
                for (int64_t block = 0; block < end; block += KEYS) {
                    for (int j = 0; j < KEYS + AHEAD; j++) {
                        const int64_t at = place(std::min(block + j, end - 1));
                        key[j] = keys + at, value[j] = values + at;
                    }
                    const int count = std::min<int64_t>(KEYS, end - block);
                    for (int64_t i = 0; i < rows; i += TILE) {
                        const int left = std::min<int64_t>(TILE, rows - i);
                        auto run = left > 2 ? absorb<T, TILE> : left == 2 ? absorb<T, 2> : absorb<T, 1>;
                        run(all, first + i, left, key, value, count, d, i == 0);
                    }
                }
            };
            const int64_t at = head * s.kv_head + search.slot * s.kv_slot;
            absorb_all(0, rows, search.prompt, keys + at, values + at, [&](int64_t t) { return t * s.kv_token; });
            for (int64_t b = 0; b < search.beams; b++) {  // the response: each beam reads its own row of the table
                const int64_t* table = search.table + b * search.table_row;
                absorb_all(b * groups, groups, search.steps, own_keys, own_values,
                           [&](int64_t t) { return (t * search.beams + table[t]) * token; });
            }
            for (int64_t i = 0; i < rows; i++) {
                T* out = y + ((search.row + i / groups) * s.n_head + head * groups + i % groups) * d;
                const float *from = all.y + i * d, total = all.total[i];
                for (int64_t c = 0; c < d; c += P * LANES)
                    store(out + c, words_of<T>(load<vec>(from + c) / total, load<vec>(from + c + (P - 1) * LANES) / total));
            }
        }
    }
}

constexpr int64_t SMALL = 1 << 14;  // values: for fewer, waking the other threads takes longer than computing

// RMSNorm of one row: y = x / rms(x) * weight. All have `size` values.
template <class X, class T> inline void normalize_row(const X* x, const T* weight, T* y, int64_t size, float epsilon) {
    vec squares{};
    for (int64_t c = 0; c < size; c += LANES) {
        vec value = widen(x + c);
        squares += value * value;
    }
    const float scale = 1 / __builtin_sqrtf(sum(squares) / size + epsilon);
    for (int64_t c = 0; c < size; c += LANES) narrow(y + c, widen(x + c) * scale * widen(weight + c));
}

// RMSNorm. x, y (rows, size); weight (size,).
template <class T>
void normalize(const T* x, const T* weight, T* y, int64_t rows, int64_t size, float epsilon) {
#pragma omp parallel for if (rows * size > SMALL)
    for (int64_t i = 0; i < rows; i++) normalize_row(x + i * size, weight, y + i * size, size, epsilon);
}

// Rotary embedding of the first `heads` heads of a row, in place. cosine, sine (head_dim / 2).
template <class T> inline void rotate_row(T* x, const T* cosine, const T* sine, int64_t heads, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t c = 0; c < half; c += LANES) {
        const vec cosines = widen(cosine + c), sines = widen(sine + c);
        for (int64_t h = 0; h < heads; h++) {
            T *left = x + h * head_dim + c, *right = left + half;
            const vec a = widen(left), b = widen(right);
            narrow(left, a * cosines - b * sines);
            narrow(right, b * cosines + a * sines);
        }
    }
}

// The same for many rows: `stride` values from row to row of x; cosine, sine (rows, head_dim / 2).
template <class T>
void rotate(T* x, const T* cosine, const T* sine, int64_t rows, int64_t heads, int64_t head_dim, int64_t stride) {
    const int64_t half = head_dim / 2;
#pragma omp parallel for if (rows * stride > SMALL)
    for (int64_t i = 0; i < rows; i++) rotate_row(x + i * stride, cosine + i * half, sine + i * half, heads, head_dim);
}

inline vec silu(vec x) {
    vec power = x * -1.44269504f;
    power = power < 126.0f ? power : vec{} + 126.0f;
    return x / (power_of_two(power) + 1.0f);
}

// SwiGLU: y = silu(gate) * up. x (rows, 2 * size), gate and up side by side; y (rows, size).
template <class T>
void gate(const T* x, T* y, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > SMALL)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < size; c += LANES)
            narrow(y + i * size + c, silu(widen(x + 2 * i * size + c)) * widen(x + (2 * i + 1) * size + c));
}

// ---- An iteration of a few decodes. It reads every weight once, and so memory is the bound. Threads do not wait for each other between two
// operators, but for work that nobody has done: see `Phase`.

constexpr int PANEL = 64;         // outputs that oneDNN packs together: (outputs / PANEL, words of inputs, PANEL) words
constexpr int64_t BLOCK = 64;     // words of inputs
constexpr int SPINS = 2000;       // looks of a thread that waits, before it lets another program have its core
constexpr int SUMS = REGISTERS / 2;  // vectors of sums that registers hold, beside what is added
constexpr int MOST_ROWS = SUMS;   // of an iteration: with more, sums leave the registers
typedef float Sums[MOST_ROWS][PANEL];

// Vectors of outputs that `rows` rows sum at once.
constexpr int vectors_for(int rows) {
    int vectors = PANEL / LANES;
    while (rows * vectors > SUMS && vectors > 1) vectors /= 2;
    return vectors;
}

// ROWS rows of x times one panel of weights. x: `words` words a row. A block of words is used for all its outputs while it is in a cache, and
// meanwhile the next block comes there: its lines are fetched at an even pace, because many at once would wait for each other. A block's
// sum is added to the others as a whole: so fewer roundings lie on the way of each.
template <class T, int ROWS> void multiply_panel(const word* panel, const word* x, int64_t words, Sums sums) {
    constexpr int V = vectors_for(ROWS);
    for (int64_t begin = 0; begin < words; begin += BLOCK) {
        const int64_t end = std::min(begin + BLOCK, words);
        const word* ahead = panel + (begin + BLOCK) * PANEL;
        for (int first = 0; first < PANEL; first += V * LANES) {
            vec own[ROWS][V] = {};
            for (int64_t c = begin; c < end; c++) {
                bits weights[V];
                for (int v = 0; v < V; v++) {
                    __builtin_prefetch(ahead, 0, 2);  // into the second cache
                    ahead += LANES;
                    weights[v] = load<bits>(panel + c * PANEL + first + v * LANES);
                }
                for (int m = 0; m < ROWS; m++)
                    for (int v = 0; v < V; v++) own[m][v] = dot<T>(own[m][v], weights[v], bits{} + x[m * words + c]);
            }
            for (int m = 0; m < ROWS; m++)
                for (int v = 0; v < V; v++) {
                    float* to = &sums[m][first + v * LANES];
                    store(to, begin ? load<vec>(to) + own[m][v] : own[m][v]);
                }
        }
    }
}

template <class T> using Multiply = void (*)(const word*, const word*, int64_t, Sums);
template <class T, int... I> Multiply<T> multiply_for(int64_t rows, std::integer_sequence<int, I...>) {
    const Multiply<T> all[] = {multiply_panel<T, I + 1>...};
    return all[rows - 1];
}

// Calls use(m, c) for the vectors of a panel's sums: row m, outputs c to c + LANES - 1 of the panel.
template <class F> inline void each_vector(int64_t rows, F use) {
    for (int64_t m = 0; m < rows; m++)
        for (int c = 0; c < PANEL; c += LANES) use(m, c);
}

// The work of one operator, in units that threads claim: each its own part, in order, so that it reads memory in order. Then it claims what others
// have left. A thread waits until all units are done, not until all threads are here: if another program has a thread's core, the others do its
// share. A Phase is of one part; `done` counts the units of all parts, in the first.
struct alignas(64) Phase {
    std::atomic<int64_t> next{0}, done{0};
};

template <class F> void run(Phase* phases, int parts, int own, int64_t units, F unit) {
    for (int i = 0; i < parts; i++) {
        const int part = (own + i) % parts;
        const int64_t first = part * units / parts, end = (part + 1) * units / parts;
        for (int64_t u; (u = first + phases[part].next.fetch_add(1, std::memory_order_relaxed)) < end;) {
            unit(u);
            phases->done.fetch_add(1, std::memory_order_release);
        }
    }
    for (int spins = 1; phases->done.load(std::memory_order_acquire) < units; spins++) {
        if (spins % SPINS == 0) std::this_thread::yield();
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
}

// Weights of a layer, linear ones in panels, and its part of the cache. Null: it has no such weight; without cosine, it does not rotate.
template <class T> struct LayerWeights {
    const T *norm_1, *preproj, *bias, *norm_q, *norm_k, *postproj, *norm_2, *ffn_ln1, *ffn_ln2, *cosine, *sine;
    T *keys, *values;
    int64_t window;  // tokens that a token sees, itself included; 0: all
};

struct StepSizes : Sizes {  // n rows, each of a request of its own
    int64_t n_layer, hidden, intermediate, vocab;  // vocab: a multiple of PANEL
    double epsilon;
};

// x (n, hidden): the rows' embeddings. logits (n, vocab). The residual stays in float from the first layer to the last.
template <class T>
void step(const T* x, const LayerWeights<T>* layers, const T* norm, const T* head, T* logits, const Request* requests, const StepSizes& s) {
    const int64_t rows = s.n, hidden = s.hidden, inner = s.intermediate, d = s.head_dim, groups = s.n_head / s.n_kv_head;
    const float scale = 1.44269504f / __builtin_sqrtf(d);  // scores are powers of 2, not of e
    const Multiply<T> multiply = multiply_for<T>(rows, std::make_integer_sequence<int, MOST_ROWS>{});
    std::vector<float> residual(rows * hidden);
    std::vector<T> qkv(rows * s.stride), y(rows * s.n_head * d), gated(rows * inner);
    std::vector<Phase> phases((5 * s.n_layer + 1) * omp_get_max_threads());
    int64_t room = 0;
    for (int64_t i = 0; i < rows; i++) room = std::max(room, requests[i].context + LANES);
    for (int64_t i = 0; i < rows * hidden; i += LANES) store(&residual[i], widen(x + i));

#pragma omp parallel
    {
        const int parts = omp_get_num_threads();
        Phase* phase = phases.data();
        const auto share = [&](int64_t units, auto unit) {  // of the next operator
            run(phase, parts, omp_get_thread_num(), units, unit);
            phase += parts;
        };
        std::vector<float> scores(groups * room);
        std::vector<T> normal(rows * hidden);
        const T* normal_of = nullptr;  // the norm whose result `normal` is
        const auto normalized = [&](const T* weight) {  // by each thread for itself, once it has claimed a unit
            if (normal_of != weight)
                for (int64_t i = 0; i < rows; i++) normalize_row(&residual[i * hidden], weight, &normal[i * hidden], hidden, s.epsilon);
            normal_of = weight;
            return normal.data();
        };
        const auto product = [&](const T* weight, int64_t panel, const T* from, int64_t inputs, Sums sums) {
            multiply((const word*)(weight + panel * PANEL * inputs), (const word*)from, inputs / PER<T>, sums);
        };
        const auto add = [&](const T* weight, const T* from, int64_t inputs) {  // to the residual
            return [=, &residual](int64_t panel) {
                Sums sums;
                product(weight, panel, from, inputs, sums);
                each_vector(rows, [&](int64_t m, int c) {
                    float* to = &residual[m * hidden + panel * PANEL + c];
                    store(to, load<vec>(to) + load<vec>(&sums[m][c]));
                });
            };
        };
        for (const LayerWeights<T>* w = layers; w < layers + s.n_layer; w++) {
            share(s.stride / PANEL, [&](int64_t panel) {
                Sums sums;
                product(w->preproj, panel, normalized(w->norm_1), hidden, sums);
                each_vector(rows, [&](int64_t m, int c) {
                    const int64_t output = panel * PANEL + c;
                    const vec bias = w->bias ? widen(w->bias + output) : vec{};
                    narrow(&qkv[m * s.stride + output], load<vec>(&sums[m][c]) + bias);
                });
            });
            share(rows * s.n_kv_head, [&](int64_t unit) {  // a key head of a row, and the query heads that read it
                const int64_t i = unit / s.n_kv_head, head = unit % s.n_kv_head;
                Request r = requests[i];
                r.begin = w->window ? std::max<int64_t>(0, r.context - w->window) : 0;
                T *q = &qkv[i * s.stride + head * groups * d], *k = &qkv[i * s.stride + (s.n_head + head) * d], *v = k + s.n_kv_head * d;
                if (w->norm_q) {
                    for (int64_t g = 0; g < groups; g++) normalize_row(q + g * d, w->norm_q, q + g * d, d, s.epsilon);
                    normalize_row(k, w->norm_k, k, d, s.epsilon);
                }
                if (w->cosine) {
                    const int64_t place = (r.context - 1) * d / 2;
                    rotate_row(q, w->cosine + place, w->sine + place, groups, d);
                    rotate_row(k, w->cosine + place, w->sine + place, 1, d);
                }
                int64_t at[KEYS];
                locate(r, s, r.context - 1, r.context, at);
                T *keys = w->keys + head * s.kv_head, *values = w->values + head * s.kv_head;
                std::memcpy(keys + at[0], k, d * sizeof(T));
                std::memcpy(values + at[0], v, d * sizeof(T));
                decode(q, keys, values, &y[(i * s.n_head + head * groups) * d], r, s, scale, scores.data(), room);
            });
            share(hidden / PANEL, add(w->postproj, y.data(), s.n_head * d));
            share(inner / PANEL, [&](int64_t panel) {  // gate and up of the same channels
                Sums gates, ups;
                const T* from = normalized(w->norm_2);
                product(w->ffn_ln1, panel, from, hidden, gates);
                product(w->ffn_ln1, inner / PANEL + panel, from, hidden, ups);
                each_vector(rows, [&](int64_t m, int c) {
                    narrow(&gated[m * inner + panel * PANEL + c], silu(load<vec>(&gates[m][c])) * load<vec>(&ups[m][c]));
                });
            });
            share(hidden / PANEL, add(w->ffn_ln2, gated.data(), inner));
        }
        share(s.vocab / PANEL, [&](int64_t panel) {
            Sums sums;
            product(head, panel, normalized(norm), hidden, sums);
            each_vector(rows, [&](int64_t m, int c) { narrow(logits + m * s.vocab + panel * PANEL + c, load<vec>(&sums[m][c])); });
        });
    }
}

}  // namespace

// What native.py calls, for either type.
#define FOR_TYPE(T, NAME)                                                                                                          \
    extern "C" void attend_##NAME(const T* q, const T* k, const T* v, T* keys, T* values, T* y, const Request* requests,          \
                                  const Sizes* sizes) {                                                                            \
        attend(q, k, v, keys, values, y, requests, *sizes);                                                                        \
    }                                                                                                                              \
    extern "C" void attend_beams_##NAME(const T* q, const T* k, const T* v, const T* keys, const T* values, T* y,                 \
                                        const Search* searches, const BeamSizes* sizes) {                                          \
        attend_beams(q, k, v, keys, values, y, searches, *sizes);                                                                  \
    }                                                                                                                              \
    extern "C" void normalize_##NAME(const T* x, const T* weight, T* y, int64_t rows, int64_t size, float epsilon) {               \
        normalize(x, weight, y, rows, size, epsilon);                                                                              \
    }                                                                                                                              \
    extern "C" void rotate_##NAME(T* x, const T* cosine, const T* sine, int64_t rows, int64_t heads, int64_t size, int64_t stride) { \
        rotate(x, cosine, sine, rows, heads, size, stride);                                                                        \
    }                                                                                                                              \
    extern "C" void gate_##NAME(const T* x, T* y, int64_t rows, int64_t size) { gate(x, y, rows, size); }                          \
    extern "C" void step_##NAME(const T* x, const LayerWeights<T>* layers, const T* norm, const T* head, T* logits,                \
                                const Request* requests, const StepSizes* sizes) {                                                 \
        step(x, layers, norm, head, logits, requests, *sizes);                                                                     \
    }

extern "C" const int64_t most_rows = MOST_ROWS;
FOR_TYPE(bf16, bfloat16)
FOR_TYPE(float, float32)
