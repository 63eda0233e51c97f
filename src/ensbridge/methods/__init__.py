"""Methods, one file each, with one contract: `loss(batch)` and `model()`."""

from ensbridge.methods.bezier import BezierCurve as BezierCurve
from ensbridge.methods.bridge_network import BridgeNetwork as BridgeNetwork
from ensbridge.methods.bridge_network import FeatureBridge as FeatureBridge
from ensbridge.methods.deep_ensemble import DeepEnsemble as DeepEnsemble
from ensbridge.methods.diffusion_bridge import Bridge as Bridge
from ensbridge.methods.diffusion_bridge import BridgeConfig as BridgeConfig
from ensbridge.methods.diffusion_bridge import DiffusionBridge as DiffusionBridge
from ensbridge.methods.distillation import EnsembleDistillation as EnsembleDistillation
from ensbridge.methods.end2 import DirichletClassifier as DirichletClassifier
from ensbridge.methods.end2 import ProxyEnD2 as ProxyEnD2
from ensbridge.methods.method import AbstractMethod as AbstractMethod
from ensbridge.methods.method import AbstractTrainable as AbstractTrainable
from ensbridge.methods.method import Batch as Batch
from ensbridge.methods.method import EmaRule as EmaRule
from ensbridge.methods.method import JointTraining as JointTraining
from ensbridge.methods.step_distillation import StepDistillation as StepDistillation
