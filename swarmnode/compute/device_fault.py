"""Errors on a device: whether one means that the device is lost, and how to drop the tensors that it keeps alive."""

from __future__ import annotations

import logging
import sys
import traceback

log = logging.getLogger(__name__)

DEVICE_FAULTS = ("CUDA error", "HIP error")  # how the texts of such RuntimeErrors begin, in torch before 2.8


def is_device_fault(error: BaseException) -> bool:
    """Return whether the device is lost to this process, for example after a failed assertion on a card.

    Call it on the thread that met the error. A card reports its faults late: the next launch or wait fails, and not always with
    a text that says so. So after any other error this waits for the card.
    """
    if any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__):  # torch 2.8 and later
        return True
    if isinstance(error, RuntimeError) and str(error).startswith(DEVICE_FAULTS):
        return True
    return not card_answers()


def card_answers() -> bool:
    """Wait for this thread's card to finish its submitted work. Returns whether it can; True if the thread has no card."""
    torch = sys.modules.get("torch")  # a process that has not imported torch has no card
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        log.critical("the card is lost", exc_info=True)
        return False
    return True


def forget_traceback(error: BaseException) -> str:
    """Drop the frames of an error and of its causes, and return the traceback as text for the log.

    The frames hold the tensors of the failed pass, and a retry would lack that memory. Clearing the frames' variables is not
    enough: functions that were made in the frames keep theirs.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    chain: BaseException | None = error
    while chain is not None:
        chain.__traceback__ = None
        chain = chain.__cause__ or chain.__context__
    return text
