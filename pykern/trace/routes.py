"""Which way the values of a tape go: each from stage to stage of those that use it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

# Whether a value can go from one stage, or the batch, to a later stage past those between, where
# there is a backward or not.
Direct = Callable[[int, int, bool], bool]

# In the place of a stage: where the arguments of the forward come from.
BATCH = -1


def everywhere(low: int, high: int, with_gradients: bool) -> bool:
    """Where all stages share one memory, there is a direct way from each to each."""
    del low, high, with_gradients
    return True


class Routes:
    """Where each value goes from the stage that makes it, and from each that uses it.

    A value goes to the first stage that uses it, from there to the next, and its gradient back the
    same way: so what later uses give is added up first, as autograd does it in one graph. Where
    there is no direct way, the stages between hand it on. Values without a gradient come to
    each stage from the batch.

    Args:
        num_stages: of the pipeline.
        users: by value, the stages that use it, in ascending order.
        makers: by value, the stage that makes it; those without one are the forward's arguments.
        trained: arguments that get a gradient.
        direct: where there is a direct way.
    """

    def __init__(
        self,
        num_stages: int,
        users: Mapping[int, list[int]],
        makers: Mapping[int, int],
        trained: Collection[int],
        direct: Callable[[int, int], bool],
    ) -> None:
        # By sender, the batch first, and by reader.
        self._ways: list[dict[int, list[int]]] = [{} for _ in range(num_stages + 1)]
        for value in sorted(users):
            at = makers.get(value, BATCH)
            if (
                at == BATCH
                and value not in trained
                and all(user == 0 or direct(BATCH, user) for user in users[value])
            ):
                for user in users[value]:
                    self._send(value, BATCH, user)
                continue
            if at == BATCH:
                self._send(value, BATCH, 0)
                at = 0
            for user in users[value]:
                while at < user:
                    reader = user if direct(at, user) else at + 1
                    self._send(value, at, reader)
                    at = reader

    def _send(self, value: int, sender: int, reader: int) -> None:
        self._ways[sender + 1].setdefault(reader, []).append(value)

    def near(self, stage: int) -> list[int]:
        """Values that go from a stage, or the batch, to the next one."""
        return self._ways[stage + 1].get(stage + 1, [])

    def farther(self, stage: int) -> list[tuple[int, list[int]]]:
        """The others, with the stage that they go to, in ascending order."""
        ways = self._ways[stage + 1]
        return [(reader, ways[reader]) for reader in sorted(ways) if reader > stage + 1]

    def leaving(self, stage: int) -> set[int]:
        """All values that leave a stage."""
        return {value for values in self._ways[stage + 1].values() for value in values}
