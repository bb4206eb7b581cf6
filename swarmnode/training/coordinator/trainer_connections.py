"""Trainer connections: a coordinator's trainers, the work that each takes, and the news that all of them receive."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from swarmnode.codec.body import Body
from swarmnode.codec.training_messages import ProgressReport, StepReport, Stopped
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.switchboard import Channel
from swarmnode.swarm.records.run import Run

HISTORY_STEPS = 1024


@dataclass(eq=False)
class TrainerLine:
    """A trainer at work: the run that it feeds, and the number of microbatches that it takes at a time."""

    channel: Channel
    run: Run
    want: int

    @property
    def peer(self) -> PeerId:
        """Id of the trainer's peer."""
        return self.channel.peer

    def send(self, body: Body) -> None:
        """Send a message to the trainer. Does nothing if the link is cut: its loss is about to be noticed."""
        if self.channel.open:
            self.channel.send(body)


class TrainerConnections:
    """The connected trainers and the news of the run: a trainer that joins later receives the steps that it has missed."""

    def __init__(self) -> None:
        self.stopped: Stopped | None = None
        self.history: deque[StepReport] = deque(maxlen=HISTORY_STEPS)
        self._lines: dict[Channel, TrainerLine] = {}

    def __repr__(self) -> str:
        return f"<TrainerConnections of {len(self._lines)} trainers, {len(self.history)} steps told>"

    def __iter__(self) -> Iterator[TrainerLine]:
        return iter(list(self._lines.values()))

    def add(self, line: TrainerLine, since: int) -> None:
        """Add a trainer. Send it the kept reports of the steps from `since` on, and the end of the run if it has ended."""
        self._lines[line.channel] = line
        for report in self.history:
            if report.step >= since:
                line.send(report)
        if self.stopped is not None:
            line.send(self.stopped)

    def of(self, peer: PeerId) -> TrainerLine | None:
        """Return the connection of `peer`, or None if it is no trainer."""
        return next((line for line in self if line.peer == peer), None)

    def remove(self, channel: Channel) -> bool:
        """Remove a trainer. Returns False if it was not connected."""
        return self._lines.pop(channel, None) is not None

    def tell(self, news: StepReport | Stopped | ProgressReport) -> None:
        """Send news to all trainers. Step reports and the end of the run are kept for trainers that come later."""
        if isinstance(news, Stopped):
            self.stopped = news
        elif isinstance(news, StepReport):
            self.history.append(news)
        for line in self:
            line.send(news)

    def begin_anew(self) -> None:
        """Forget the reports and the end of the last run."""
        self.history.clear()
        self.stopped = None
