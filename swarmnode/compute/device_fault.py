"""What an error on a device means: that something failed, or that the device is lost; and what it must not keep alive."""

from __future__ import annotations

import logging
import sys
import traceback

log = logging.getLogger(__name__)

DEVICE_FAULTS = ("CUDA error", "HIP error")  # how the texts of such RuntimeErrors begin, in torch before 2.8


def is_device_fault(error: BaseException) -> bool:
    """Whether the device is lost to this process, as by a failed assertion on a card. To be asked on the thread that met the error.

    A card tells of it late: what fails is whatever is launched next or waits for it next, and not always in so many words. So
    after any error it is waited for.
    """
    if any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__):  # torch 2.8 and later
        return True
    if isinstance(error, RuntimeError) and str(error).startswith(DEVICE_FAULTS):
        return True
    return not card_answers()


def card_answers() -> bool:
    """Waits; whether this thread's card, if it has one, does what it was told until now."""
    torch = sys.modules.get("torch")  # who has not imported it has no card
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        log.critical("the card is lost", exc_info=True)
        return False
    return True


def forget_traceback(error: BaseException) -> str:
    """Drop the frames of an error and of what led to it, and with them the tensors of the pass that failed, which would lack where
    it is tried again; what they were as text, for the log. To clear the frames' variables is not enough: functions that were made
    in them keep theirs."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    chain: BaseException | None = error
    while chain is not None:
        chain.__traceback__ = None
        chain = chain.__cause__ or chain.__context__
    return text
