"""`scores.json`, the one file from which every table and figure is made: its types, reading, and text.

No torch here, so that reports start without it.
"""

from ensbridge.evaluation.scores.columns import COLUMNS as COLUMNS
from ensbridge.evaluation.scores.columns import Column as Column
from ensbridge.evaluation.scores.columns import cells as cells
from ensbridge.evaluation.scores.reading import parse_corrupted as parse_corrupted
from ensbridge.evaluation.scores.reading import parse_curve as parse_curve
from ensbridge.evaluation.scores.reading import parse_scores as parse_scores
from ensbridge.evaluation.scores.reading import read_scores as read_scores
from ensbridge.evaluation.scores.rows import Bin as Bin
from ensbridge.evaluation.scores.rows import CorruptedRow as CorruptedRow
from ensbridge.evaluation.scores.rows import CorruptedSet as CorruptedSet
from ensbridge.evaluation.scores.rows import Curve as Curve
from ensbridge.evaluation.scores.rows import Detection as Detection
from ensbridge.evaluation.scores.rows import ImageScore as ImageScore
from ensbridge.evaluation.scores.rows import Kind as Kind
from ensbridge.evaluation.scores.rows import Loss as Loss
from ensbridge.evaluation.scores.rows import Method as Method
from ensbridge.evaluation.scores.rows import ModelInfo as ModelInfo
from ensbridge.evaluation.scores.rows import PredictionSets as PredictionSets
from ensbridge.evaluation.scores.rows import Reliability as Reliability
from ensbridge.evaluation.scores.rows import Row as Row
from ensbridge.evaluation.scores.rows import Scores as Scores
from ensbridge.evaluation.scores.rows import Transition as Transition
from ensbridge.evaluation.scores.rows import Uncertainty as Uncertainty
from ensbridge.evaluation.scores.rows import Width as Width
from ensbridge.evaluation.scores.rows import find_control as find_control
from ensbridge.evaluation.scores.rows import name_by_teachers as name_by_teachers
from ensbridge.evaluation.scores.rows import name_rows as name_rows
from ensbridge.evaluation.scores.summary import CorruptedGroup as CorruptedGroup
from ensbridge.evaluation.scores.summary import Group as Group
from ensbridge.evaluation.scores.summary import Summary as Summary
from ensbridge.evaluation.scores.summary import summarise as summarise
