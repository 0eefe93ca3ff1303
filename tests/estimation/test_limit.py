"""Test estimates against real training runs in processes with a memory limit.

A run that should fit must finish, and a run that should not fit must fail.
"""

import json

from tests.support.warm_python import WarmPython

SCRIPT = """
import json
import lflops
from tests.support.limited_trainings import CASES, loss_of, map_every_tensor, trains

map_every_tensor()
answers = []
for name in ("LSTM, RMSprop", "embedding, SGD with momentum"):
    case = CASES[name]
    found = lflops.estimate(case.build, case.batch(case.samples), backward=True, loss=loss_of, optimizer=case.optimizer).memory
    for share in (0.97, 1.06):
        limit = int(found.peak_bytes * share)
        answers.append((name, found.fits(limit, margin=0.05), trains(name, limit)))
print(json.dumps(answers))
"""


def test_what_fits_trains_and_what_does_not_runs_out_of_memory(warm_python: WarmPython) -> None:
    """A limit of 97 % of the estimated peak is too small, and a limit of 106 % is enough.

    The kernel enforces the limit, so the result does not depend on any counter of lflops.
    """
    ended = warm_python.run(SCRIPT)
    assert ended.status == 0, ended.err
    answers = json.loads(ended.out)
    assert [[False, False], [True, True]] * 2 == [answer[1:] for answer in answers]
