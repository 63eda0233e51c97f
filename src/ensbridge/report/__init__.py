"""Tables, figures and one page from one or several `scores.json`, without torch."""

from ensbridge.report.headline import control_sentence as control_sentence
from ensbridge.report.headline import headline as headline
from ensbridge.report.tables import PaperRow as PaperRow
from ensbridge.report.tables import paper_rows as paper_rows
from ensbridge.report.terminal import corrupted_tables as corrupted_tables
from ensbridge.report.terminal import paper_table as paper_table
from ensbridge.report.terminal import rich_table as rich_table
from ensbridge.report.writing import shipped as shipped
from ensbridge.report.writing import write_report as write_report
