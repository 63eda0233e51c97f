"""Tables, figures and one page from a `scores.json`, without torch."""

from ensbridge.report.figures import cost_quality as cost_quality
from ensbridge.report.headline import control_sentence as control_sentence
from ensbridge.report.headline import headline as headline
from ensbridge.report.page import render_page as render_page
from ensbridge.report.page import write_page as write_page
from ensbridge.report.table import rich_table as rich_table
