"""Figures: the table of a run in, a chart out. Each is two functions: `<name>_data` selects and shapes, `<name>` draws.

    profile         a metric over depth, model beside model         The Shape of Learning, figure 1
    dynamics        its mean over the blocks as training goes on    figure 2
    steps           one model's profile at several steps            figures 3 and 4
    heatmap         every site at every checkpoint
    populations     one model with and without its sink tokens
    stages          metrics through the final norm
    scales          dimension against the scale at which it is read
    lengths         a metric against the length of windows
    alignment       energy of gradients in tangent spaces, and every control
    alignment_bins  the same by token frequency
    curvature       curvature against the exponent of sampling
    concepts        concepts through training
    difference      one run less another, over depth or training    of two tables
    owners          who owns the leading axis of each site          of a Unit
    embeddings      rows of an embedding matrix in two dimensions   of a Unit
    verdicts        what `judge` returned                           of Verdicts

The others take the table of `Store.table()`. `corpus` and `keys` (of units) narrow it; corpora are never mixed, and a
run that holds one number under several settings is refused until `keys` chooses: nothing is averaged that was not asked
for. `catalogue` makes every figure that a run has rows for, `contrast` those of the difference of two runs; `save`
writes a chart as HTML, PNG, SVG, PDF or JSON.
"""

from anisoscope.figures.curving import concepts as concepts
from anisoscope.figures.curving import concepts_data as concepts_data
from anisoscope.figures.curving import curvature as curvature
from anisoscope.figures.curving import curvature_data as curvature_data
from anisoscope.figures.depth import populations as populations
from anisoscope.figures.depth import populations_data as populations_data
from anisoscope.figures.depth import profile as profile
from anisoscope.figures.depth import profile_data as profile_data
from anisoscope.figures.depth import steps as steps
from anisoscope.figures.depth import steps_data as steps_data
from anisoscope.figures.differences import difference as difference
from anisoscope.figures.differences import difference_data as difference_data
from anisoscope.figures.dimension import lengths as lengths
from anisoscope.figures.dimension import lengths_data as lengths_data
from anisoscope.figures.dimension import scales as scales
from anisoscope.figures.dimension import scales_data as scales_data
from anisoscope.figures.drawing import FORMATS as FORMATS
from anisoscope.figures.drawing import Chart as Chart
from anisoscope.figures.drawing import rendered as rendered
from anisoscope.figures.drawing import save as save
from anisoscope.figures.drawing import theme as theme
from anisoscope.figures.drawing import themed as themed
from anisoscope.figures.gallery import SECTIONS as SECTIONS
from anisoscope.figures.gallery import Figure as Figure
from anisoscope.figures.gallery import catalogue as catalogue
from anisoscope.figures.gallery import catalogue_within as catalogue_within
from anisoscope.figures.gallery import contrast as contrast
from anisoscope.figures.judgements import verdicts as verdicts
from anisoscope.figures.judgements import verdicts_data as verdicts_data
from anisoscope.figures.places import embeddings as embeddings
from anisoscope.figures.places import embeddings_data as embeddings_data
from anisoscope.figures.places import owners as owners
from anisoscope.figures.places import owners_data as owners_data
from anisoscope.figures.places import stages as stages
from anisoscope.figures.places import stages_data as stages_data
from anisoscope.figures.rows import count_label as count_label
from anisoscope.figures.tangents import alignment as alignment
from anisoscope.figures.tangents import alignment_bins as alignment_bins
from anisoscope.figures.tangents import alignment_bins_data as alignment_bins_data
from anisoscope.figures.tangents import alignment_data as alignment_data
from anisoscope.figures.training import dynamics as dynamics
from anisoscope.figures.training import dynamics_data as dynamics_data
from anisoscope.figures.training import heatmap as heatmap
from anisoscope.figures.training import heatmap_data as heatmap_data
