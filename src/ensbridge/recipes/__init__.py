"""Recipes: Python functions that return frozen descriptions of a whole experiment."""

from ensbridge.recipes.digits import digits as digits
from ensbridge.recipes.recipe import Recipe as Recipe
from ensbridge.recipes.run import run_recipe as run_recipe
