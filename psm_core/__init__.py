"""psm_core: how small can a trained network get, by which factorization, and at what cost?"""

from psm_core import errors
from psm_core.checkpoint import load_checkpoint, load_model, save_checkpoint, verify_checkpoint
from psm_core.experiments.evaluation import evaluate
from psm_core.experiments.plan import uniform_plan
from psm_core.experiments.record import Record
from psm_core.experiments.store import ResultStore
from psm_core.experiments.study import Study
from psm_core.factorization import Factorization
from psm_core.methods import METHODS, at_budget, method_from_json
from psm_core.methods.prune import Prune
from psm_core.methods.psm import PSM
from psm_core.methods.svd import SVD
from psm_core.methods.tt import TensorTrain
from psm_core.methods.tucker import Tucker
from psm_core.network.calibration import Calibration, calibrate
from psm_core.network.compress import compress
from psm_core.network.data import load_data
from psm_core.network.layers import layers
from psm_core.progress import JobCancelled, Step

__all__ = [
    "METHODS",
    "PSM",
    "SVD",
    "Calibration",
    "Factorization",
    "JobCancelled",
    "Prune",
    "Record",
    "ResultStore",
    "Step",
    "Study",
    "TensorTrain",
    "Tucker",
    "at_budget",
    "calibrate",
    "compress",
    "errors",
    "evaluate",
    "layers",
    "load_checkpoint",
    "load_data",
    "load_model",
    "method_from_json",
    "save_checkpoint",
    "uniform_plan",
    "verify_checkpoint",
]
