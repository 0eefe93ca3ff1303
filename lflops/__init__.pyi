# The public names, for type checkers and editors. `__init__.py` loads a name at its first use.

from lflops import hardware as hardware, tensorboard as tensorboard
from lflops.analysis.compare.diff import diff as diff
from lflops.analysis.roofline import roofline as roofline
from lflops.analysis.utilization import utilization as utilization
from lflops.analysis.what_if import what_if as what_if
from lflops.attribution.hooks import scope as scope
from lflops.errors import (
    CountError as CountError,
    HardwareError as HardwareError,
    LflopsError as LflopsError,
    ProfileError as ProfileError,
    ScheduleError as ScheduleError,
)
from lflops.estimation.estimate import estimate as estimate
from lflops.estimation.largest_batch import largest_batch as largest_batch
from lflops.estimation.planning.best_checkpointing import best_checkpointing as best_checkpointing
from lflops.estimation.planning.plan import plan as plan
from lflops.flop_counter.count import count as count, counting as counting
from lflops.flop_counter.operator_costs import register_formula as register_formula
from lflops.formulas.table import Cost as Cost
from lflops.hardware.calibrate import calibrate as calibrate
from lflops.hardware.chips import Hardware as Hardware
from lflops.integrations.deepspeed.api import (
    FlopsProfiler as FlopsProfiler,
    get_model_profile as get_model_profile,
)
from lflops.integrations.lightning.lightning_profiler import LightningProfiler as LightningProfiler
from lflops.integrations.lightning.monitor import FlopsMonitor as FlopsMonitor
from lflops.integrations.loops.monitor import monitor as monitor
from lflops.ledger.account import Ledger as Ledger
from lflops.ledger.ledger_file import load_run as load_run
from lflops.monitoring.schedule import Schedule as Schedule
from lflops.profile.json_file import load as load
from lflops.profile.profile import Profile as Profile
from lflops.ranks.merge.merge import merge as merge
from lflops.ranks.stragglers import stragglers as stragglers
from lflops.report.explanation import explain as explain
from lflops.timing.measure import measure as measure

__version__: str
