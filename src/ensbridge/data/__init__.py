"""Data: images in memory, their augmentation, and the sets that recipes use."""

from ensbridge.data.augment import Augment as Augment
from ensbridge.data.digits import Splits as Splits
from ensbridge.data.digits import load_digits as load_digits
from ensbridge.data.loader import ImageSet as ImageSet
from ensbridge.data.loader import as_image_set as as_image_set
