"""Networks: the members, the score networks, and features read from any network."""

from ensbridge.nets.features import forward_with_features as forward_with_features
from ensbridge.nets.frn import FRN as FRN
from ensbridge.nets.preprocessed import Preprocessed as Preprocessed
from ensbridge.nets.resnet import ResNet as ResNet
from ensbridge.nets.score import ScoreNet as ScoreNet
from ensbridge.nets.sizing import MapScore as MapScore
from ensbridge.nets.tail import Tail as Tail
from ensbridge.nets.token_score import TokenScore as TokenScore

resnet32x2 = ResNet.resnet32x2
resnet32x4 = ResNet.resnet32x4
resnet34 = ResNet.resnet34
