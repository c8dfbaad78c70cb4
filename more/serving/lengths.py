"""Output lengths, predicted with a stated error, for policies that want them. No torch.

`tag_lengths` writes what a predictor says into each request's tag `predicted_tokens`. So a policy
reads it like any other tag, and it may as well come from a file, or from a client.

    oracle          the true length: no error
    classes=0.55    the right one of five classes of length with this probability (more/pipeline/
                    predictors.py: TD-Pipe's BERT reaches 0.52 to 0.58). It knows the answer, and
                    errs as often
    constant=200    the same number for all: no prediction
"""

from collections.abc import Sequence
from statistics import fmean

from batch import Request
from more.pipeline.predictors import named, predicted

TAG = "predicted_tokens"


def tag_lengths(requests: Sequence[Request], predictor: str, seed: int = 0) -> list[Request]:
    """Give each request its tag. Returns the same requests."""
    predict = named(predictor, [request.ends_after for request in requests], seed)
    for request in requests:
        request.tags = {**request.tags, TAG: str(predicted(predict, request))}
    return list(requests)


def length_error(requests: Sequence[Request]) -> float:
    """Mean of |predicted - true| over the mean true length, of requests that have the tag."""
    missed = [abs(int(request.tags[TAG]) - request.ends_after) for request in requests]
    return fmean(missed) / fmean(request.ends_after for request in requests)
