"""Everything taken from hivemind: p2pd, its client and their messages. The only file that imports hivemind.

To import one module of hivemind's packages means to import all of it (averaging, optimisers, torch, scipy): 1.3 s and 150 MiB,
while the modules used here take 0.2 s and 23 MiB. So during their import the packages around them are empty stand-ins. Afterwards
hivemind is removed from `sys.modules`, so that a later import in the same process gets the whole of it. If hivemind was imported
before, it is used as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

from swarmnode.hollow_package import folders_of, put_hollow_package

_HOLLOW = ("hivemind", "hivemind.utils")
_UTILS = {  # names that the modules below import from hivemind.utils, and the submodules that define them
    "get_logger": "logging"
}


@contextlib.contextmanager
def _hollow_packages() -> Iterator[None]:
    if "hivemind" in sys.modules:
        yield
        return
    try:
        for name in _HOLLOW:
            put_hollow_package(name, folders_of(name))
        for thing, module in _UTILS.items():
            source = importlib.import_module(f"hivemind.utils.{module}")
            setattr(sys.modules["hivemind.utils"], thing, getattr(source, thing))
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "hivemind"]:
            del sys.modules[name]


with _hollow_packages():
    import hivemind.hivemind_cli as _binaries
    from hivemind.p2p import P2P, PeerID
    from hivemind.proto import dht_pb2, p2pd_pb2
    from hivemind.utils.multiaddr import Multiaddr as HivemindMultiaddr
    from hivemind.utils.multiaddr import codecs as _codecs

    for _codec in pkgutil.iter_modules(_codecs.__path__):
        _codecs.codec_by_name(_codec.name)  # else imported when first met, which would bring in the whole of hivemind

P2PD = Path(_binaries.__path__[0]) / "p2pd"

logging.getLogger("hivemind").setLevel(logging.CRITICAL)  # it warns of peers that come and go, which is normal here

__all__ = ["P2P", "P2PD", "HivemindMultiaddr", "PeerID", "dht_pb2", "p2pd_pb2"]
