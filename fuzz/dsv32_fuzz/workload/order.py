"""The persistent batch: which row a request has, from step to step (vLLM v1, `InputBatch` and the batch reordering).

A request keeps its row as long as it is scheduled. A request that finished, was aborted or preempted, or got no budget
leaves a hole. Requests that enter fill the lowest holes first, then are appended; a hole that is left is filled by the
last request. With decode-first order, only requests outside the region of their kind move.
"""

from __future__ import annotations


class Row:
    """A request's state inside the engine; lengths in tokens."""

    __slots__ = ("computed", "drafts", "left", "number", "placed", "prompt", "query_len", "reach", "tokens")

    def __init__(self, number: int, input_len: int, output_len: int) -> None:
        self.number = number
        self.left = output_len  # output tokens still to come
        self.tokens = input_len  # prompt and outputs known so far
        self.placed = False  # whether it has a row in the persistent batch
        self.evict()

    def evict(self) -> None:
        """Nothing is computed any more: what is known so far is the prompt now."""
        self.prompt = self.tokens
        self.computed = 0
        self.drafts = 0  # draft tokens proposed for the next step
        self.reach = 0  # `computed` if every draft of the last step had been accepted
        self.query_len = 0  # rows in the current step


def place(rows: list[Row], running: list[Row], admitted: list[Row]) -> list[Row]:
    """The persistent batch of this step from that of the last one: exactly the requests with a query length."""
    holes = [i for i, r in enumerate(rows) if not r.query_len]
    for i in holes:
        rows[i].placed = False
    # As in vLLM, new requests take their rows before those that come back after a step without budget.
    entering = admitted + [r for r in running if r.query_len and not r.placed and r not in admitted]
    if not holes and not entering:
        return rows
    slots: list[Row | None] = [r if r.query_len else None for r in rows]
    for r in entering:
        r.placed = True
        if holes:
            slots[holes.pop(0)] = r
        else:
            slots.append(r)
    return _condense(slots)


def _condense(slots: list[Row | None]) -> list[Row]:
    """Fill each hole, lowest first, with the last request behind it."""
    filled: list[Row] = []
    last = len(slots) - 1
    for i, row in enumerate(slots):
        while last > i and slots[last] is None:
            last -= 1
        if i > last:
            break
        if row is None:
            row, last = slots[last], last - 1
        if row is not None:
            filled.append(row)
    return filled


def region(row: Row, threshold: int) -> int:
    """Where decode-first order wants a row: 0 decode, 1 short last chunk, 2 long continuation, 3 first chunk."""
    if not row.computed:
        return 3
    if row.query_len > threshold:
        return 2
    return 0 if row.computed >= row.prompt else 1


def reorder_decode_first(rows: list[Row], threshold: int) -> list[Row]:
    """Rows by region; a row that already lies in its region stays, the others keep their order among themselves."""
    regions = [region(r, threshold) for r in rows]
    wanted = sorted(regions)
    if regions == wanted:
        return rows
    misplaced = [i for i, (is_, want) in enumerate(zip(regions, wanted, strict=True)) if is_ != want]
    result = list(rows)
    for target, source in zip(misplaced, sorted(misplaced, key=regions.__getitem__), strict=True):
        result[target] = rows[source]
    return result
