"""What attention does and what it costs: arrays in, arrays out. ``npattn.plots`` draws the results."""

from npattn.analysis.distance import DistanceProfile as DistanceProfile
from npattn.analysis.distance import distance_profile as distance_profile
from npattn.analysis.formulas import Cost as Cost
from npattn.analysis.formulas import attention_cost as attention_cost
from npattn.analysis.formulas import linear_attention_cost as linear_attention_cost
from npattn.analysis.heads import HeadSummary as HeadSummary
from npattn.analysis.heads import head_agreement as head_agreement
from npattn.analysis.heads import head_summary as head_summary
from npattn.analysis.layers import cost as cost
from npattn.analysis.layers import layer_cost as layer_cost
from npattn.analysis.rollout import rollout as rollout
