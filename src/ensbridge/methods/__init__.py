"""Methods, one file each, with one contract: `loss(batch)` and `model()`."""

from ensbridge.bridge.bridge import Bridge as Bridge
from ensbridge.bridge.bridge import BridgeConfig as BridgeConfig
from ensbridge.bridge.bridge import FeatureBridge as FeatureBridge
from ensbridge.methods.base import AbstractMethod as AbstractMethod
from ensbridge.methods.base import AbstractTrainable as AbstractTrainable
from ensbridge.methods.base import Batch as Batch
from ensbridge.methods.base import EmaRule as EmaRule
from ensbridge.methods.base import JointTraining as JointTraining
from ensbridge.methods.bezier import BezierCurve as BezierCurve
from ensbridge.methods.bridge_network import BridgeNetwork as BridgeNetwork
from ensbridge.methods.deep_ensemble import DeepEnsemble as DeepEnsemble
from ensbridge.methods.diffusion_bridge import DiffusionBridge as DiffusionBridge
from ensbridge.methods.end2 import DirichletClassifier as DirichletClassifier
from ensbridge.methods.end2 import ProxyEnD2 as ProxyEnD2
from ensbridge.methods.ensemble_distillation import EnsembleDistillation as EnsembleDistillation
from ensbridge.methods.flow_matching import Flow as Flow
from ensbridge.methods.flow_matching import FlowConfig as FlowConfig
from ensbridge.methods.flow_matching import FlowMatching as FlowMatching
from ensbridge.methods.joint_distillation import JointDistillation as JointDistillation
from ensbridge.methods.latent_factor import LatentFactorConfig as LatentFactorConfig
from ensbridge.methods.latent_factor import LatentFactorDistillation as LatentFactorDistillation
from ensbridge.methods.step_distillation import StepDistillation as StepDistillation
