"""Trainer connections: the trainers at work for a coordinator, what each offers, and the news that all of them hear."""

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
    """A trainer at work: the run that it feeds, and how many microbatches it takes at a time."""

    channel: Channel
    run: Run
    want: int

    @property
    def peer(self) -> PeerId:
        """Who is at the other end."""
        return self.channel.peer

    def send(self, body: Body) -> None:
        """Tell it something; where the link is cut, its loss is about to be heard of."""
        if self.channel.open:
            self.channel.send(body)


class TrainerConnections:
    """Who came, and what was told: a trainer that comes later hears the steps that it has not heard of."""

    def __init__(self) -> None:
        self.stopped: Stopped | None = None
        self.history: deque[StepReport] = deque(maxlen=HISTORY_STEPS)
        self._lines: dict[Channel, TrainerLine] = {}

    def __repr__(self) -> str:
        return f"<TrainerConnections of {len(self._lines)} trainers, {len(self.history)} steps told>"

    def __iter__(self) -> Iterator[TrainerLine]:
        return iter(list(self._lines.values()))

    def add(self, line: TrainerLine, since: int) -> None:
        """A trainer that has heard of all steps below `since`."""
        self._lines[line.channel] = line
        for report in self.history:
            if report.step >= since:
                line.send(report)
        if self.stopped is not None:
            line.send(self.stopped)

    def of(self, peer: PeerId) -> TrainerLine | None:
        """The line of a peer, which has one."""
        return next((line for line in self if line.peer == peer), None)

    def remove(self, channel: Channel) -> bool:
        """A trainer has gone; False where it had before."""
        return self._lines.pop(channel, None) is not None

    def tell(self, news: StepReport | Stopped | ProgressReport) -> None:
        """Let all hear it. What was committed and how it ended are told to later ones too."""
        if isinstance(news, Stopped):
            self.stopped = news
        elif isinstance(news, StepReport):
            self.history.append(news)
        for line in self:
            line.send(news)

    def begin_anew(self) -> None:
        """Another run: what was told of the last one is past."""
        self.history.clear()
        self.stopped = None
