"""A fast ensemble as a folder that can be shipped: weights, description and model card.

Nothing in the folder is ever executed: tensors come from safetensors, the rest is JSON that is checked value
by value, and a network is built by name from a fixed table, or from what the caller allows to be called.
"""

from ensbridge.deploy.saving.folder import load as load
from ensbridge.deploy.saving.folder import save as save
from ensbridge.deploy.saving.hub import push as push
