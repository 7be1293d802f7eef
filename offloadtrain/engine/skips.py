"""Warns of skipped steps: one may be an accident, after a few in a row nothing is trained."""

from __future__ import annotations

import logging

from offloadtrain.engine.step_report import StepReport

_log = logging.getLogger(__name__)

ALARM = 3
"""Skipped steps in a row."""
_NAMED = 3


def warn_of_skips(report: StepReport) -> None:
    """Warn at the third skip in a row, once a row, with the first parameters that caused it."""
    if report.skipped_in_a_row != ALARM:
        return
    named = ", ".join(f"'{name}'" for name in report.nonfinite[:_NAMED])
    more = len(report.nonfinite) - _NAMED
    _log.warning(
        "%d steps in a row were skipped: the gradient norm is %s, so that nothing is trained. Not "
        "finite are the gradients of %s%s. %s last_step.skipped tells of every step.",
        report.skipped_in_a_row,
        report.grad_norm,
        named,
        f" and {more} more" if more > 0 else "",
        "Are the loss and the inputs finite? A lower learning rate or a longer warm-up may help."
        if report.loss_scale == 1.0
        else f"The loss scale was {report.loss_scale:g} and is halved by every skip, which is "
        "ordinary in the first steps of fp16 and at no other time.",
    )
