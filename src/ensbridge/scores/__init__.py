"""`scores.json`, the one file from which every table and figure is made: its types, reading, and text.

No torch here, so that reports start without it.
"""

from ensbridge.scores.columns import COLUMNS as COLUMNS
from ensbridge.scores.columns import Column as Column
from ensbridge.scores.columns import cells as cells
from ensbridge.scores.corrupted import CorruptedGroup as CorruptedGroup
from ensbridge.scores.names import name_by_teachers as name_by_teachers
from ensbridge.scores.names import name_rows as name_rows
from ensbridge.scores.reading import parse_corrupted as parse_corrupted
from ensbridge.scores.reading import parse_curve as parse_curve
from ensbridge.scores.reading import parse_scores as parse_scores
from ensbridge.scores.reading import read_scores as read_scores
from ensbridge.scores.rows import Bin as Bin
from ensbridge.scores.rows import CorruptedRow as CorruptedRow
from ensbridge.scores.rows import CorruptedSet as CorruptedSet
from ensbridge.scores.rows import Curve as Curve
from ensbridge.scores.rows import Kind as Kind
from ensbridge.scores.rows import Loss as Loss
from ensbridge.scores.rows import Method as Method
from ensbridge.scores.rows import ModelInfo as ModelInfo
from ensbridge.scores.rows import Reliability as Reliability
from ensbridge.scores.rows import Row as Row
from ensbridge.scores.rows import Scores as Scores
from ensbridge.scores.rows import Transition as Transition
from ensbridge.scores.rows import Width as Width
from ensbridge.scores.rows import find_control as find_control
from ensbridge.scores.summary import Group as Group
from ensbridge.scores.summary import Summary as Summary
from ensbridge.scores.summary import summarise as summarise
