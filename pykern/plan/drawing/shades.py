"""Which shade of its kind's colour an action has: by its replica, then by its chunk.

A timeline does not say where its stages were placed, but it shows it.
"""

from collections import defaultdict

from pykern._C import Action, Timeline


class Shades:
    """The shades of one timeline, from light to dark.

    Microbatches whose stages run on the same devices are of one replica; a chunk is one of several
    stages that a device has of one replica, counted from the input.
    """

    def __init__(self, timeline: Timeline) -> None:
        places = defaultdict(set)
        for device, row in enumerate(timeline.rows):
            for span in row:
                places[span.action.microbatch].add((span.action.stage, device))
        replicas: dict[frozenset[tuple[int, int]], int] = {}
        self._replica_of = {
            microbatch: replicas.setdefault(frozenset(places[microbatch]), len(replicas))
            for microbatch in sorted(places)
        }
        self._chunk_of: dict[tuple[int, int, int], int] = {}
        held: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place, replica in replicas.items():
            for stage, device in sorted(place):
                self._chunk_of[replica, device, stage] = len(held[replica, device])
                held[replica, device].append(stage)
        self.num_replicas = max(len(replicas), 1)
        self.num_chunks = max(map(len, held.values()), default=1)

    @property
    def num_shades(self) -> int:
        """How many there are."""
        return self.num_replicas * self.num_chunks

    def shade_of(self, device: int, action: Action) -> int:
        """From 0, the lightest."""
        replica = self._replica_of[action.microbatch]
        chunk = self._chunk_of[replica, device, action.stage]
        return replica * self.num_chunks + chunk
