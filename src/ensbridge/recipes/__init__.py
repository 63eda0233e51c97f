"""Recipes: Python functions that return frozen descriptions of a whole experiment, and their runs."""

from ensbridge.recipes.digits import digits as digits
from ensbridge.recipes.outline import outline as outline
from ensbridge.recipes.paper import cifar10 as cifar10
from ensbridge.recipes.paper import cifar100 as cifar100
from ensbridge.recipes.paper import imagenet64 as imagenet64
from ensbridge.recipes.paper import tiny_imagenet as tiny_imagenet
from ensbridge.recipes.plan import Plan as Plan
from ensbridge.recipes.recipe import Recipe as Recipe
from ensbridge.recipes.run import check_runs as check_runs
from ensbridge.recipes.run import evaluate_run as evaluate_run
from ensbridge.recipes.run import run_recipe as run_recipe
from ensbridge.recipes.run import train_recipe as train_recipe
