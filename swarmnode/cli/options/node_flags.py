"""The flags of who lends a machine, and how it is reached; `node_options.py` says what they mean."""

from __future__ import annotations

import typer

DEVICE = typer.Option("auto", "--device", help="auto, cpu, cuda, cuda:1, mps.")
DTYPE = typer.Option("auto", "--dtype", help="auto, float32, bfloat16, float16.")
QUANTIZE = typer.Option("none", "--quantize", metavar="none|int8|nf4", help="Quantise the weights at load.")
CAPTURE = typer.Option(
    "auto", "--capture", metavar="auto|off", help="On a card, replay steps of decoding as CUDA graphs where that works."
)
COMPRESS = typer.Option(
    "auto",
    "--compress",
    metavar="auto|none|bf16|int8|int4|topk|adatopk|slowest",
    help="In training, what is sent to other stages, if train does not say: auto takes no more than a slow link needs.",
)
AUDIT_SHARE = typer.Option(
    "3%",
    "--audit-share",
    metavar="SHARE",
    help="In training, compute so much of what others computed once more, to find who is false; 0%: nothing.",
)
THREADS = typer.Option(0, "--threads", min=0, max=4096, help="CPU threads to compute with; default: torch's choice.")
THROTTLE = typer.Option(
    0.0,
    "--throttle",
    metavar="UNITS_PER_S",
    min=0.0,
    max=1e9,
    hidden=True,
    help="Compute as a device of this speed would.",
)
SPAN = typer.Option("", "--span", metavar="A:B", help="Hold units A to B-1; default: what the swarm needs most.")
PLAN = typer.Option(
    None,
    "--plan",
    metavar="PLAN.json",
    help="In training, begin where plan --model --json put this node, and stay while the plan's other peers are at their places.",
    show_default=False,
)

MEMORY = typer.Option("", "--memory", metavar="SIZE", help="Memory to lend, as 6GB or 512MiB; default: what is free.")
DISK = typer.Option(
    "",
    "--disk",
    metavar="SIZE",
    help="Disk space for fetched weights of all swarms, and for training states of others; default: most of what is free.",
)
MIN_HOLDERS = typer.Option(
    2,
    "--min-holders",
    metavar="N",
    min=1,
    max=16,
    help="In training, have states of units that fewer nodes hold kept on other peers' disks, too; 1: of none.",
)
MAX_UPLOAD = typer.Option(
    "", "--max-upload", metavar="RATE", help="Send no faster than this, as in 8Mbit; default: as fast as it goes."
)
MAX_DOWNLOAD = typer.Option("", "--max-download", metavar="RATE", help="The same of what comes from peers.")
SHARE = typer.Option(
    "100%", "--cpu-share", "--gpu-share", metavar="SHARE", help="Compute for so much of the time only, as 50%."
)
NICE = typer.Option(0, "--nice", min=0, max=19, help="Let other programs go first: the more, the higher, up to 19.")
IDLE_DISK = typer.Option(False, "--idle-disk", help="Let other programs go first at the disk (ionice idle).")
MAX_GPU_TEMPERATURE = typer.Option(
    None, "--max-gpu-temperature", metavar="°C", min=30, max=110, help="Rest more where a card is hotter."
)
MAX_GPU_POWER = typer.Option(
    None, "--max-gpu-power", metavar="WATTS", min=1, max=10_000, help="Rest more where a card draws more."
)
MAX_AGE = typer.Option("", "--max-age", metavar="12h", help="Leave in order after so long.", show_default=False)

HOST_MADDR = typer.Option([], "--host-maddr", metavar="MADDR", help="Where to listen. Repeatable.")
ANNOUNCE_MADDR = typer.Option(
    [], "--announce-maddr", metavar="MADDR", help="Address under which others reach this peer. Repeatable."
)
PEER = typer.Option(
    [], "--peer", metavar="MADDR", help="A peer of the swarm to join through, beside the invite's. Repeatable."
)
NAT = typer.Option(False, "--nat/--no-nat", help="Ask the router to map a port (UPnP).")
DIRECT = typer.Option(True, "--direct/--no-direct", help="Connect to other peers by plain TCP, too, sealed.")
LAN = typer.Option(False, "--lan/--no-lan", help="Find peers on the local network and be found (mDNS).")
