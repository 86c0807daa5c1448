"""What the papers claim, with which models and settings, and what a run says to each claim. No torch.

papers.py     the three papers, claim by claim
plans.py      what is to be measured at each size
working.py    train, fetch, measure what is not stored yet
judging.py    claims.judge -> reproduced, present before training, not reproduced, inconclusive, not tested here
showing.py    the table for people
"""

from anisoscope.reproductions.judging import Outcome as Outcome
from anisoscope.reproductions.judging import judge_paper as judge_paper
from anisoscope.reproductions.papers import PAPERS as PAPERS
from anisoscope.reproductions.papers import find_paper as find_paper

__all__ = ["PAPERS", "Outcome", "find_paper", "judge_paper"]
