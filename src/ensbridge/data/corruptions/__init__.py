"""The 19 corruptions of CIFAR-10-C, made here from clean images. No torch here.

They follow Hendrycks & Dietterich (2019) with the constants of their CIFAR variant, each image drawn from a
seed. The images are not bit-comparable with the published set: the random numbers differ, and frost uses
generated textures instead of photographs.
"""

from ensbridge.data.corruptions.apply import CORRUPTIONS as CORRUPTIONS
from ensbridge.data.corruptions.apply import SEVERITIES as SEVERITIES
from ensbridge.data.corruptions.apply import check_images as check_images
from ensbridge.data.corruptions.apply import corrupt as corrupt
from ensbridge.data.corruptions.write import default_folder as default_folder
from ensbridge.data.corruptions.write import write_corrupted as write_corrupted
