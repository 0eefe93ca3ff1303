"""The clean steps of all ranks on their way to rank 0, all through the run: some numbers for each step, now and then, and no collective."""

from collections.abc import Callable, Iterable

from msgspec import msgpack
from msgspec.structs import replace

from lflops.collect.ranks.store import RankStore
from lflops.merging.clean_steps import CleanSteps, most_steps
from lflops.merging.rank_stats import waits_in
from lflops.merging.rank_table import Place
from lflops.profile.model import Profile
from lflops.profile.records import RankComparison
from lflops.profile.steps import Step

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.1


class SharedSteps:
    """Hands in a rank's clean steps, and on rank 0 keeps the last ones of all ranks."""

    def __init__(self, store: RankStore, rank: int, ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._unsent: dict[str, list[Step]] = {}
        self._times: dict[tuple[str, int], int] = {}  # that a rank has shared steps of a stage
        self._steps: dict[str, CleanSteps] = {}
        self._waits: dict[str, set[Place]] = {}
        # On rank 0, by stage, what these steps say of the ranks, as far as that was looked at.
        self.comparisons: dict[str, RankComparison] = {}

    def add(self, stage: str, steps: Iterable[Step]) -> None:
        """Take further steps of this rank. What is not sent in time is forgotten."""
        unsent = self._unsent.setdefault(stage, [])
        unsent.extend(steps)
        del unsent[: -most_steps(self._ranks)]

    def send(self) -> None:
        """Leave them for rank 0; on that, take what the others have left, and look at all of it now and then."""
        for stage in list(self._unsent):
            steps, self._unsent[stage] = self._unsent[stage], []
            number = self._times[stage, self._rank] = self._times.get((stage, self._rank), 0) + 1
            if not self._rank:
                self._steps.setdefault(stage, CleanSteps()).add(0, steps, ranks=self._ranks)
                self._take(stage)
                if not number & number - 1:  # 1, 2, 4, 8, …: all of it stays in proportion to the run
                    self._compare(stage)
            elif steps and not self._store.has("left/0"):
                self._store.put(self._key(stage, self._rank, number), msgpack.encode(steps))

    def take_last(self, pause: Callable[[float], object], is_over: Callable[[], bool]) -> None:
        """On rank 0, at the end: wait until the others have left, or until it is over, and take all that is there."""
        seconds = FIRST_PAUSE
        while not is_over() and self._store.number("left") < self._ranks - 1:
            pause(seconds)
            seconds = min(2 * seconds, LONGEST_PAUSE)
        for stage in self._steps:
            self._take(stage)

    def compare(self) -> None:
        """Look at all that is there."""
        for stage in self._steps:
            self._compare(stage)

    def improve(self, profile: Profile) -> Profile:
        """A window of all ranks, with the comparison of the run's clean steps where these are more than its own."""
        stage, of_window = profile.run.stage or "", profile.clean_comparison
        if of_window is None:  # ranks with different modules
            self._waits.pop(stage, None)
            return profile
        self._waits[stage] = waits_in(profile)
        if stage in self._steps and self._steps[stage].common > of_window.steps:
            self._compare(stage)
            return replace(profile, clean_comparison=self.comparisons.get(stage, of_window))
        return profile

    def _take(self, stage: str) -> None:
        for rank in range(1, self._ranks):
            number = self._times.get((stage, rank), 0) + 1
            while self._store.has(key := self._key(stage, rank, number)):
                self._steps[stage].add(rank, msgpack.decode(self._store.take(key), type=list[Step]), ranks=self._ranks)
                self._times[stage, rank] = number
                number += 1

    def _compare(self, stage: str) -> None:
        found = self._steps[stage].compared(self._waits[stage]) if stage in self._waits else None
        if found is not None:
            self.comparisons[stage] = found

    def _key(self, stage: str, rank: int, number: int) -> str:
        return f"steps/{stage}/{rank}/{number}"
