"""Recipes: Python functions that return frozen descriptions of a whole experiment, and their runs."""

from ensbridge.experiments.digits import digits as digits
from ensbridge.experiments.paper import cifar10 as cifar10
from ensbridge.experiments.paper import cifar100 as cifar100
from ensbridge.experiments.paper import imagenet64 as imagenet64
from ensbridge.experiments.paper import tiny_imagenet as tiny_imagenet
from ensbridge.experiments.plan import Plan as Plan
from ensbridge.experiments.recipe import Recipe as Recipe
from ensbridge.experiments.run import check_runs as check_runs
from ensbridge.experiments.run import dry_run as dry_run
from ensbridge.experiments.run import evaluate_run as evaluate_run
from ensbridge.experiments.run import run_recipe as run_recipe
from ensbridge.experiments.run import train_recipe as train_recipe
from ensbridge.experiments.saved import evaluate_saved as evaluate_saved
