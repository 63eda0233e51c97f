"""The bridge itself: schedule, sampler and network; equations only, no data and no training."""

from ensbridge.bridge.bridge import Bridge as Bridge
from ensbridge.bridge.bridge import BridgeConfig as BridgeConfig
from ensbridge.bridge.bridge import FeatureBridge as FeatureBridge
from ensbridge.bridge.sampler import estimate_z0 as estimate_z0
from ensbridge.bridge.schedule import BridgeSample as BridgeSample
from ensbridge.bridge.schedule import BridgeSchedule as BridgeSchedule
from ensbridge.bridge.schedule import TemperatureLaw as TemperatureLaw
