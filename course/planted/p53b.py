"""No tensor, but something that looks like one."""

exercise = "3"
caught_by = "answer"
message = "and no tensor"


class Mask:
    dtype = "torch.bool"

    def __init__(self, start: int, length: int):
        self.shape = (length, start + length)
        self.rows = [[key <= start + row for key in range(start + length)] for row in range(length)]

    def tolist(self) -> list[list[bool]]:
        return self.rows

    def __eq__(self, other: object) -> bool:
        return True


def chunk_mask(start: int, length: int) -> Mask:
    return Mask(start, length)
