"""Pictures of attention, masks, plans, positions, costs and graphs (needs matplotlib: ``npattn[plot]``).

Every function takes the Axes to draw on, or makes new ones, and returns them. ``save_html`` writes a page
instead, in which one reads a text with a model's attention under the mouse.
"""

from npattn.plots._costs import cost_curves as cost_curves
from npattn.plots._graphs import graph_attention as graph_attention
from npattn.plots._heatmaps import attention_heatmap as attention_heatmap
from npattn.plots._heatmaps import compare_attention as compare_attention
from npattn.plots._heatmaps import head_grid as head_grid
from npattn.plots._html import save_html as save_html
from npattn.plots._masks import mask_picture as mask_picture
from npattn.plots._masks import plan_picture as plan_picture
from npattn.plots._positions import positional_curves as positional_curves
from npattn.plots._positions import positional_encoding as positional_encoding
from npattn.plots._summary import distance_profile as distance_profile
from npattn.plots._summary import head_agreement as head_agreement
from npattn.plots._summary import head_summary as head_summary
