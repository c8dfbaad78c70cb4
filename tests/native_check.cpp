// native.cpp beside plain loops in double, on random cases, without torch. `make cpus` compiles this for ARM and runs it in qemu, where
// there is no PyTorch; it compiles for any CPU. What nobody may read is NaN. The bounds are those of tests/shared.py.

#include "../more/fast/native.cpp"

#include <cmath>
#include <cstdio>
#include <random>

namespace {

std::mt19937 dice(0);
int64_t draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(dice); }
float normal() { return std::normal_distribution<float>()(dice); }

double number(float x) { return x; }
double number(bf16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}
void put(float* to, float x) { *to = x; }
void put(bf16* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    *to = std::isnan(x) ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

template <class T> using Values = std::vector<T>;
template <class T> Values<T> filled(int64_t count, bool random) {
    Values<T> made(count);
    for (T& value : made) put(&value, random ? normal() : NAN);
    return made;
}

constexpr double UNIT = 0x1p-24;
template <class T> constexpr double ROUNDING = sizeof(T) == 4 ? UNIT : 0x1p-8;
int64_t compared = 0, wrong = 0;

template <class T> void compare(const char* what, T found, double exact, double bound) {
    compared++;
    if (std::abs(number(found) - exact) <= bound + ROUNDING<T> * std::abs(exact)) return;
    if (wrong++ < 10) std::printf("%s: %g, but %g is right, within %g\n", what, number(found), exact, bound);
}

// One head of one row over the keys and values that `at` finds: token -> their first value.
template <class T, class At>
void compare_row(const char* what, const T* q, const T* y, int64_t context, int64_t d, At at, const Values<T>& keys, const Values<T>& values) {
    std::vector<double> weights(context), exact(d), sizes(d);
    double most = -INFINITY, longest = 0, norm = 0, total = 0;
    for (int64_t c = 0; c < d; c++) norm += number(q[c]) * number(q[c]);
    for (int64_t t = 0; t < context; t++) {
        double score = 0, squares = 0;
        for (int64_t c = 0; c < d; c++) {
            const double key = number(keys[at(t) + c]);
            score += number(q[c]) * key, squares += key * key;
        }
        most = std::max(most, weights[t] = score / std::sqrt(d));
        longest = std::max(longest, squares);
    }
    for (double& weight : weights) total += weight = std::exp(weight - most);
    for (int64_t t = 0; t < context; t++)
        for (int64_t c = 0; c < d; c++) {
            const double term = weights[t] / total * number(values[at(t) + c]);
            exact[c] += term, sizes[c] += std::abs(term);
        }
    const double share = (d + 8) * UNIT * std::sqrt(norm * longest / d) + (2 * context + 32) * UNIT + ROUNDING<T>;
    for (int64_t c = 0; c < d; c++) compare(what, y[c], exact[c], share * (sizes[c] + std::abs(exact[c])));
}

// A hybrid batch of 1 to 4 requests, each with some rows in a slot of its own.
template <class T> void check_attend(void (*run)(const T*, const T*, const T*, T*, T*, T*, const Request*, const Sizes*)) {
    const int64_t kv = draw(1, 2), groups = draw(1, 3), heads = kv * groups, d = 32 * draw(1, 4), slots = 5, length = 150;
    std::vector<Request> requests;
    int64_t rows = 0;
    for (int64_t n = draw(1, 4), slot = 0; slot < n; slot++) {
        const int64_t own = draw(0, 1) ? 1 : draw(2, 70), context = own + draw(0, 70);
        requests.push_back({rows, own, slot, context});
        rows += own;
    }
    const int64_t stride = (heads + 2 * kv) * d;
    const Values<T> qkv = filled<T>(rows * stride, true);
    Values<T> keys = filled<T>(kv * slots * length * d, false), values = keys, y = filled<T>(rows * heads * d, false);
    const auto place = [&](const Request& r, int64_t head, int64_t t) { return ((head * slots + r.slot) * length + t) * d; };
    for (const Request& r : requests)
        for (int64_t head = 0; head < kv; head++)
            for (int64_t at = place(r, head, 0); at < place(r, head, r.context - r.rows); at++) put(&keys[at], normal()), put(&values[at], normal());
    const Sizes sizes{(int64_t)requests.size(), heads, kv, d, stride, slots * length * d, length * d};
    run(qkv.data(), qkv.data() + heads * d, qkv.data() + (heads + kv) * d, keys.data(), values.data(), y.data(), requests.data(), &sizes);
    for (const Request& r : requests)
        for (int64_t i = 0; i < r.rows; i++)
            for (int64_t head = 0; head < heads; head++)
                compare_row(r.rows == 1 ? "decode" : "chunk", &qkv[(r.row + i) * stride + head * d], &y[((r.row + i) * heads + head) * d],
                            r.context - r.rows + i + 1, d, [&](int64_t t) { return place(r, head / groups, t); }, keys, values);
}

// One or two searches: prompts in slots, responses in segments of (steps, beams, kv, d), read through a random table.
template <class T>
void check_beams(void (*run)(const T*, const T*, const T*, const T*, const T*, T*, const Search*, const BeamSizes*)) {
    const int64_t kv = draw(1, 2), groups = draw(1, 3), heads = kv * groups, d = 32 * draw(1, 4), slots = 3, length = 150, n = draw(1, 2);
    Values<T> keys = filled<T>(kv * slots * length * d, false), values = keys, own_keys[2], own_values[2];
    std::vector<int64_t> tables[2];
    std::vector<Search> searches;
    int64_t rows = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t beams = draw(1, 9), prompt = draw(1, length), steps = draw(1, 80);
        for (int64_t head = 0; head < kv; head++)
            for (int64_t at = (head * slots + i) * length * d, end = at + prompt * d; at < end; at++)
                put(&keys[at], normal()), put(&values[at], normal());
        own_keys[i] = filled<T>(steps * beams * kv * d, true), own_values[i] = filled<T>(steps * beams * kv * d, true);
        for (int64_t b = 0; b < beams; b++)
            for (int64_t t = 0; t < steps; t++) tables[i].push_back(t == steps - 1 ? b : draw(0, beams - 1));
        searches.push_back({rows, beams, i, prompt, steps, 0, steps, own_keys[i].data(), own_values[i].data(), tables[i].data()});
        rows += beams;
    }
    const int64_t stride = (heads + 2 * kv) * d;
    const Values<T> qkv = filled<T>(rows * stride, true);
    Values<T> y = filled<T>(rows * heads * d, false);
    BeamSizes sizes;
    (Sizes&)sizes = {n, heads, kv, d, stride, slots * length * d, length * d};
    sizes.kv_token = d, sizes.layer = 0;
    run(qkv.data(), qkv.data() + heads * d, qkv.data() + (heads + kv) * d, keys.data(), values.data(), y.data(), searches.data(), &sizes);
    for (int64_t i = 0; i < n; i++) {
        const Search& s = searches[i];
        for (int64_t b = 0; b < s.beams; b++)
            for (int64_t head = 0; head < heads; head++) {
                Values<T> seen_keys, seen_values;  // prompt and response, one behind the other
                const auto take = [&](const Values<T>& k, const Values<T>& v, int64_t at) {
                    seen_keys.insert(seen_keys.end(), &k[at], &k[at] + d), seen_values.insert(seen_values.end(), &v[at], &v[at] + d);
                };
                const int64_t own = head / groups;
                for (int64_t t = 0; t < s.prompt; t++) take(keys, values, ((own * slots + i) * length + t) * d);
                for (int64_t t = 0; t < s.steps; t++) take(own_keys[i], own_values[i], ((t * s.beams + s.table[b * s.steps + t]) * kv + own) * d);
                compare_row("beam", &qkv[(s.row + b) * stride + head * d], &y[((s.row + b) * heads + head) * d], s.prompt + s.steps, d,
                            [&](int64_t t) { return t * d; }, seen_keys, seen_values);
            }
    }
}

template <class T>
void check_small(void (*norm)(const T*, const T*, T*, int64_t, int64_t, float), void (*turn)(T*, const T*, const T*, int64_t, int64_t, int64_t, int64_t),
                 void (*swiglu)(const T*, T*, int64_t, int64_t)) {
    const int64_t rows = draw(1, 20), size = 32 * draw(1, 20), heads = draw(1, 3), d = 32 * draw(1, 4);
    const Values<T> x = filled<T>(rows * 2 * size, true), weight = filled<T>(size, true);
    Values<T> y = filled<T>(rows * size, false);
    norm(x.data(), weight.data(), y.data(), rows, size, 1e-5f);
    for (int64_t i = 0; i < rows; i++) {
        double squares = 0;
        for (int64_t c = 0; c < size; c++) squares += number(x[i * size + c]) * number(x[i * size + c]);
        for (int64_t c = 0; c < size; c++) {
            const double exact = number(x[i * size + c]) / std::sqrt(squares / size + 1e-5f) * number(weight[c]);
            compare("norm", y[i * size + c], exact, (size + 16) * UNIT * std::abs(exact));
        }
    }
    swiglu(x.data(), y.data(), rows, size);
    for (int64_t i = 0; i < rows * size; i++) {
        const double in = number(x[i / size * 2 * size + i % size]), up = number(x[(i / size * 2 + 1) * size + i % size]);
        const double exact = in / (1 + std::exp(-in)) * up;
        compare("gate", y[i], exact, (16 + 4 * std::abs(in)) * UNIT * std::abs(exact));
    }
    const int64_t stride = (heads + 1) * d;
    const Values<T> before = filled<T>(rows * stride, true), cosine = filled<T>(rows * d / 2, true), sine = filled<T>(rows * d / 2, true);
    Values<T> turned = before;
    turn(turned.data(), cosine.data(), sine.data(), rows, heads, d, stride);
    for (int64_t i = 0; i < rows * stride; i++) {
        const int64_t row = i / stride, c = i % d, half = d / 2, angle = row * half + c % half;
        if (i % stride >= heads * d) {  // the last head stays as it is
            compare("rotate", turned[i], number(before[i]), 0);
            continue;
        }
        const double own = number(before[i]) * number(cosine[angle]);
        const double other = number(before[c < half ? i + half : i - half]) * number(sine[angle]) * (c < half ? -1 : 1);
        compare("rotate", turned[i], own + other, 4 * UNIT * (std::abs(own) + std::abs(other)));
    }
}

}  // namespace

int main() {
    for (int i = 0; i < 60; i++) {
        check_attend<float>(attend_float32), check_attend<bf16>(attend_bfloat16);
        check_beams<float>(attend_beams_float32), check_beams<bf16>(attend_beams_bfloat16);
        check_small<float>(normalize_float32, rotate_float32, gate_float32);
        check_small<bf16>(normalize_bfloat16, rotate_bfloat16, gate_bfloat16);
    }
    std::printf("%lld values, %lld wrong; vectors of %d floats\n", (long long)compared, (long long)wrong, LANES);
    return wrong > 0;
}
