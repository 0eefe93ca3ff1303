# The public names for type checkers and editors: `__init__.py` loads each of them when it is first used.

from lflops import hardware as hardware, tensorboard as tensorboard
from lflops.analyze.compare.diff import diff as diff
from lflops.analyze.ranks.imbalance import imbalance as imbalance
from lflops.analyze.speed.roofline import roofline as roofline
from lflops.analyze.speed.utilization import utilization as utilization
from lflops.analyze.speed.what_if import what_if as what_if
from lflops.collect.attribution.hooks import scope as scope
from lflops.collect.calibration.calibrate import calibrate as calibrate
from lflops.collect.count import count as count, counting as counting
from lflops.collect.estimate.estimate import estimate as estimate
from lflops.collect.estimate.largest_batch import largest_batch as largest_batch
from lflops.collect.measure import measure as measure
from lflops.collect.operator_costs.table import register_formula as register_formula
from lflops.deepspeed.api import FlopsProfiler as FlopsProfiler, get_model_profile as get_model_profile
from lflops.errors import (
    CountError as CountError,
    HardwareError as HardwareError,
    LflopsError as LflopsError,
    ProfileError as ProfileError,
    ScheduleError as ScheduleError,
)
from lflops.formulas.table import Cost as Cost
from lflops.hardware.chips import Hardware as Hardware
from lflops.ledger.account import Ledger as Ledger
from lflops.ledger.run import load_run as load_run
from lflops.lightning.monitor import FlopsMonitor as FlopsMonitor
from lflops.loops.monitor import monitor as monitor
from lflops.merging.merge import merge as merge
from lflops.planning.best_checkpointing import best_checkpointing as best_checkpointing
from lflops.planning.plan import plan as plan
from lflops.profile.json_file import load as load
from lflops.profile.model import Profile as Profile
from lflops.report.explanation import explain as explain
from lflops.schedule import Schedule as Schedule

__version__: str
