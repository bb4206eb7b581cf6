"""All metrics of swarmnode, in seconds and bytes. All carry the label `swarm` besides the labels named here."""

from __future__ import annotations

from swarmnode.metrics.metric import Metric, MetricKind

PREFIX = "swarmnode_"


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"{PREFIX}{name}_total", MetricKind.COUNTER, help, labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(PREFIX + name, MetricKind.GAUGE, help, labels)


def _histogram(name: str, help: str, *labels: str) -> Metric:
    return Metric(PREFIX + name, MetricKind.HISTOGRAM, help, labels)


# The process and its machine
BUILD = _gauge("build_info", "Always 1; the versions are in the labels.", "version", "python", "torch")
DISK_FREE = _gauge("disk_free_bytes", "Space left where the process keeps its state.")
DISK_SIZE = _gauge("disk_size_bytes", "Space in all where the process keeps its state.")
GPU_BUSY = _gauge("gpu_utilization_ratio", "Share of the last moments in which the card computed.", "gpu", "model")
GPU_MEMORY_USED = _gauge("gpu_memory_used_bytes", "Memory of the card in use by all processes.", "gpu", "model")
GPU_MEMORY_SIZE = _gauge("gpu_memory_size_bytes", "Memory of the card.", "gpu", "model")
GPU_TEMPERATURE = _gauge("gpu_temperature_celsius", "Temperature of the card.", "gpu", "model")
GPU_POWER = _gauge("gpu_power_watts", "Power that the card draws.", "gpu", "model")
MEMORY_RESERVED = _gauge(
    "memory_reserved_bytes",
    "Memory reserved in the ledger of the host or of its device, by account.",
    "place",
    "account",
)
MEMORY_PEAK = _gauge("memory_peak_bytes", "Largest amount reserved in a ledger at once so far.", "place")
MEMORY_LIMIT = _gauge("memory_limit_bytes", "Limit of a ledger's reservations; 0 if it has none.", "place")

# The swarm as this peer sees it
STATE = _gauge("node_state", "1 for the state in which this peer is, 0 for the others.", "state")
PEERS = _gauge("directory_peers", "Peers in the live directory, this one included, by state.", "state")
UNITS = _gauge("units", "Units of the model.")
UNITS_WITHOUT_HOLDER = _gauge("units_without_holder", "Units that no ready peer holds.")
LEAST_HOLDERS = _gauge("unit_holders_min", "Ready holders of the layer that has the fewest.")
DHT_SECONDS = _histogram("dht_seconds", "Time of an operation on the DHT that succeeded.", "operation")
DHT_FAILURES = _counter("dht_failures", "Operations on the DHT that failed.", "operation")
MOVES = _counter("moves", "Moves of this node to another span.")

# Lending: when the machine's owner lets the node work
LENDING_STATE = _gauge("lending_state", "1 for the state in which lending is, 0 for the others.", "state")
LENDING_HELD = _gauge("lending_held", "1 while the owner, or a rule, wants the node to pause.", "by")
LENDING_PAUSES = _counter("lending_pauses", "Times that the node gave the machine back.")

LENT_SECONDS = _counter("lent_seconds", "Time in which the node lent the machine.")

# Links
LINK_BYTES = _counter("link_bytes", "Bytes on all links, headers included.", "protocol", "direction")
ROUND_TRIP_SECONDS = _histogram("link_round_trip_seconds", "Round trips of pings on links.", "protocol")
_TENSOR = ("span", "work", "codec", "direction")
TENSOR_RAW_BYTES = _counter("tensor_raw_bytes", "Tensors sent to other stages, before compression.", *_TENSOR)
TENSOR_ENCODED_BYTES = _counter("tensor_encoded_bytes", "Tensors sent to other stages, as they travelled.", *_TENSOR)
CODEC_LINKS = _gauge(
    "codec_links", "Links to other stages by the codec that was chosen last.", "span", "codec", "direction"
)

# A stage. Its work is to serve (in the phases prefill and decode) or to train (forward and backward).
TOKENS = _counter("tokens", "Positions computed (samples if the model has no positions).", "span", "phase")
UNIT_TOKENS = _counter("unit_tokens", "Work done: positions times the layers that they passed.", "span", "phase")
MICROBATCHES = _counter("microbatches", "Inputs computed: of sessions, or of a training step.", "span", "phase")
HOP_SECONDS = _histogram(
    "hop_seconds", "From an input's arrival to its result: waiting and computing.", "span", "phase"
)
PASS_SECONDS = _histogram("pass_seconds", "Time of one pass through the span.", "span", "phase")
BATCH_SIZE = _histogram("batch_size", "Sessions that share a pass.", "span", "phase")
QUEUE = _gauge("queue_length", "Jobs that wait for the compute thread.", "span", "work")
SESSIONS = _gauge("sessions", "Sessions held.", "span")
CACHE_RESERVED = _gauge("cache_reserved_bytes", "Cache reserved by sessions.", "span")
CACHE_SIZE = _gauge("cache_size_bytes", "Cache that sessions may reserve.", "span")
REFUSALS = _counter("refused_sessions", "Sessions refused, by cause.", "span", "cause")
FAULTS = _counter("faults", "Faults of routes that this stage reported, by cause.", "span", "work", "cause")
SPEED = _gauge("decode_units_per_second", "Speed that this node announces for decode steps.", "span")
DRAFTS = _counter(
    "drafts",
    "Tokens guessed for sessions that begin at this stage, by proposer and result.",
    "span",
    "proposer",
    "result",
)

EXPERTS = _counter(
    "experts",
    "Experts of mixtures that one in 32 passes with guesses used: those that texts needed, and further ones for guesses.",
    "span",
    "by",
)
EXPERT_READS = _counter(
    "expert_reads",
    "Experts that passes found on a card or in memory (hit), that they read from the disk, and that moved to the card.",
    "span",
    "by",
)
EXPERT_READ_BYTES = _counter("expert_read_bytes", "Bytes of experts that were read from the disk.", "span")
# Tuning: of a stage that lends itself to adapters of others
TUNED_ADAPTERS = _gauge("tuned_adapters", "Adapters of other peers that are being tuned here.", "span")
TUNING_SECONDS = _counter("tuning_seconds", "Time in which the device tuned adapters of other peers.", "span")

# Work that clients sign receipts for
ANSWERS = _counter("answers", "Texts (passes of a module) that this node has worked on for others than its owner.")
COMPLETED_WORK = _counter("completed_unit_tokens", "Work done for clients: positions (samples) times units.")
POSITIONS_FOR_OTHERS = _gauge(
    "positions_for_others", "Positions (samples) computed for clients that are not of this home."
)
RECEIPTED_WORK = _counter("receipted_unit_tokens", "The part of it for which a client has signed.")
RECEIPTS = _counter("receipts", "Receipts that clients brought, by result.", "result")
CREDIT_WORK = _gauge("credit_unit_tokens", "Sum of the work in all kept receipts.", "work")
CREDIT_CLIENTS = _gauge("credit_clients", "Distinct clients that signed them.")
CREDIT = _gauge("credit", "Credit for that work after the discount for few clients.")

# Training: of a stage
TRAINING_STEP = _gauge("training_step", "Step that the stage is at.", "span")
TRAINING_LOSS = _gauge("training_loss", "Mean loss of the last step.", "span")
TRAINING_NORM = _gauge("training_gradient_norm", "Norm of the last step's gradient, of all layers.", "span")
AVERAGING_SECONDS = _histogram("averaging_seconds", "Time in which replicas agreed on a gradient.", "span")
NOT_FINITE = _counter("not_finite", "Microbatches in which this stage met NaN or infinity.", "span")

# Training: of a trainer, the node that feeds the data
TRAINER_STEP = _gauge("trainer_step", "Last step that is done.")
TRAINER_LOSS = _gauge("trainer_loss", "Mean loss of the last step.")
TRAINER_PEERS = _gauge("trainer_peers", "Peers that took part in the last step.")
TRAINER_EXPERT_LOAD = _gauge(
    "trainer_expert_load",
    "Load of the busiest expert of the last step over the mean load; 0 without losses of routers.",
)
TRAINER_WAITING = _gauge("trainer_waiting", "1 while training waits because layers have no holder.")
TRAINER_STEP_SECONDS = _histogram("trainer_step_seconds", "Time of a step.")
TRAINER_EXPECTED_SECONDS = _gauge(
    "trainer_expected_step_seconds", "Expected time of the last step, estimated when it began."
)
TRAINER_TOKENS = _counter("trainer_tokens", "Tokens of finished steps (samples if the model has no tokens).")

# A client that generates
CLIENT_SESSIONS = _counter("client_sessions", "Generations that ended, by result.", "result")
CLIENT_TOKENS = _counter("client_tokens", "Tokens received.")
CLIENT_DRAFTS = _counter(
    "client_drafts", "Guessed tokens of this client's texts, by proposer and result.", "proposer", "result"
)
FIRST_TOKEN_SECONDS = _histogram("client_first_token_seconds", "From the call to the first token.")
TOKEN_SECONDS = _histogram("client_token_seconds", "From one token to the next.")
AUDITS = _counter("audits", "Sessions of this client that were recomputed, by result.", "result")
SPOT_CHECKS = _counter("spot_checks", "Microbatches of other stages that were recomputed, by result.", "result")
FINDINGS = _counter("findings", "Findings about other peers, by kind.", "kind")
REROUTES = _counter("reroutes", "Sessions that were moved to another route, by cause.", "cause")

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
