"""Networks: the members, the score networks, and features read from any network."""

from ensbridge.metrics.predictions import calibrated as calibrated
from ensbridge.models.ensemble import SampledEnsemble as SampledEnsemble
from ensbridge.models.ensemble import at_least_float32 as at_least_float32
from ensbridge.models.ensemble import weights_digest as weights_digest
from ensbridge.models.features import forward_with_features as forward_with_features
from ensbridge.models.frn import FRN as FRN
from ensbridge.models.named import ImageInput as ImageInput
from ensbridge.models.named import NamedNetwork as NamedNetwork
from ensbridge.models.preprocessed import Preprocessed as Preprocessed
from ensbridge.models.pyramid_score import PyramidScore as PyramidScore
from ensbridge.models.resnet import BasicBlock as BasicBlock
from ensbridge.models.resnet import ResNet as ResNet
from ensbridge.models.resnet import initialise as initialise
from ensbridge.models.score_net import ScoreNet as ScoreNet
from ensbridge.models.score_net import TokenScore as TokenScore
from ensbridge.models.sizing import MapScore as MapScore
from ensbridge.models.tail import Tail as Tail

resnet32x2 = ResNet.resnet32x2
resnet32x4 = ResNet.resnet32x4
resnet34 = ResNet.resnet34
