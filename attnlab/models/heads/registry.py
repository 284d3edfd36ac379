"""Named heads over a vocabulary, and over classes: which class, which paper, what it claims."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from attnlab.config import spec
from attnlab.models.heads.adaptive import AdaptiveSoftmax
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.heads.fourier import FourierHead
from attnlab.models.heads.hierarchical import HierarchicalSoftmax
from attnlab.models.heads.language import BoundedHead, LanguageHead
from attnlab.models.heads.links import Evidence, LinkHead, SigSoftmax, Spherical, StableMax, Taylor
from attnlab.models.heads.margin import ArcFaceHead
from attnlab.models.heads.mixture import MixtureOfSoftmaxes
from attnlab.models.heads.sampled import SampledSoftmax
from attnlab.models.heads.surrogates import CompSum, LabelRobust, SurrogateHead
from attnlab.signature import checked_fields


@checked_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadRecipe:
    """One published head as data.

    Attributes:
      spec: the head, from `attnlab.config.spec`, which is made as `head(dim, vocab, rngs=rngs)`; one of classes takes
        `classes=` besides, and ignores the vocabulary.
      cite: the paper, authors and year first, then the address.
      cost: products of a vector of width `d` that the loss of a token takes in training; `o` is the vocabulary.
      normalised: probabilities of all classes sum to one, and the loss is minus the logarithm of the target's.
      exact: training minimises that loss; otherwise an estimate of it, or it and something else (see the notes).
      streams: the loss and the prediction of a token depend on its own hidden state alone.
      divided: its classes may lie on several devices, over the mesh axis `tensor`.
      notes: where the head departs from the paper.
      small: arguments that suit a test, of a vocabulary of a dozen tokens.
    """

    spec: ConfigDict
    cite: str
    cost: str
    normalised: bool = True
    exact: bool = True
    streams: bool = True
    divided: bool = True
    notes: str = ''
    small: Mapping[str, Any] = MappingProxyType({})

    def reduced(self) -> ConfigDict:
        """The spec in sizes that suit a test."""
        made = self.spec.copy_and_resolve_references()
        for name, value in self.small.items():
            with made.ignore_type():
                made[name] = value
        return made


SPHERICAL = 'de Brebisson and Vincent 2016, https://arxiv.org/abs/1511.05042'
CHUNKED = 'scores are stored for 128 tokens of every row at a time, and computed again in the backward pass'
BY_FREQUENCY = 'tokens must be numbered by frequency, the most frequent first, which bytes are not'

HEADS: dict[str, HeadRecipe] = {
    'softmax': HeadRecipe(
        spec=spec(LanguageHead), cite='Bridle 1990, https://doi.org/10.1007/978-3-642-76153-9_28', cost='o'
    ),
    'softmax_z_loss': HeadRecipe(
        spec=spec(BoundedHead),
        cite='Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311',
        cost='o',
        exact=False,
        notes='the penalty of the normaliser is trained on and not reported',
    ),
    'softmax_soft_cap': HeadRecipe(
        spec=spec(BoundedHead, z_loss=0.0, soft_cap=30.0),
        cite='Gemma team 2024, https://arxiv.org/abs/2408.00118',
        cost='o',
        small={'soft_cap': 2.0},
    ),
    'mixture_of_softmaxes': HeadRecipe(
        spec=spec(MixtureOfSoftmaxes),
        cite='Yang et al. 2018, https://arxiv.org/abs/1711.03953',
        cost='m o + m d, of m components',
        notes='mixed in log space without the 1e-8 of the released code; 4 components (15 in the paper), no bias '
        'of the vocabulary and no dropout of its own',
        small={'components': 3},
    ),
    'sigsoftmax': HeadRecipe(
        spec=spec(LinkHead, link=SigSoftmax()),
        cite='Kanai et al. 2018, https://arxiv.org/abs/1805.10829',
        cost='o',
        notes=CHUNKED,
    ),
    'taylor': HeadRecipe(spec=spec(LinkHead, link=Taylor()), cite=SPHERICAL, cost='o', notes=CHUNKED),
    'spherical': HeadRecipe(
        spec=spec(LinkHead, link=Spherical()),
        cite=SPHERICAL,
        cost='o',
        notes=f'{CHUNKED}; the added constant, 0.01, is ours',
    ),
    'stablemax': HeadRecipe(
        spec=spec(LinkHead, link=StableMax()),
        cite='Prieto et al. 2025, https://arxiv.org/abs/2501.04697',
        cost='o',
        notes=f'{CHUNKED}; in float32, where the released code computes in float64',
    ),
    'evidential': HeadRecipe(
        spec=spec(LinkHead, link=Evidence()),
        cite='Sensoy, Kaplan and Kandemir 2018, https://arxiv.org/abs/1806.01768',
        cost='o',
        notes=f'{CHUNKED}; concentrations 1 + softplus(x), the loss of their mean, without a term for the evidence',
    ),
    'adaptive_softmax': HeadRecipe(
        spec=spec(AdaptiveSoftmax),
        cite='Grave et al. 2017, https://arxiv.org/abs/1609.04309',
        cost='o / 8 + 3 o / 32 + o / 32, by its cutoffs',
        notes=f'{BY_FREQUENCY}; every cluster is computed for every token',
        small={'cutoffs': (3, 7)},
    ),
    'hierarchical': HeadRecipe(
        spec=spec(HierarchicalSoftmax),
        cite='Morin and Bengio 2005, https://proceedings.mlr.press/r5/morin05a.html',
        cost='the path, about the entropy of the counts in bits',
        notes='a Huffman tree of the counts given, or of counts 1 / (j + 1); predictions without sampling compute all '
        'probabilities',
    ),
    'sampled_softmax': HeadRecipe(
        spec=spec(SampledSoftmax),
        cite='Jean et al. 2015, https://arxiv.org/abs/1412.2007',
        cost='n + 1, of n drawn tokens',
        exact=False,
        notes=f'{BY_FREQUENCY}; one draw for all tokens of a batch; evaluation is over the whole vocabulary',
        small={'negatives': 5},
    ),
}
"""Every head by the name that `head=` of a config and `attnlab zoo --heads` have for it."""

MAO = 'Mao, Mohri and Zhong 2023, https://arxiv.org/abs/2304.07288'
ZHU = 'Zhu, Ying and Yang 2023, https://arxiv.org/abs/2112.14869'

CLASSIFIERS: dict[str, HeadRecipe] = {
    'linear': HeadRecipe(
        spec=spec(ClassificationHead),
        cite='Bridle 1990, https://doi.org/10.1007/978-3-642-76153-9_28',
        cost='o',
        divided=False,
    ),
    'generalised_cross_entropy': HeadRecipe(
        spec=spec(SurrogateHead, surrogate=CompSum(1.7)),
        cite=MAO,
        cost='o',
        exact=False,
        divided=False,
        notes='the loss with tau = 1.7, which is q = 0.7 of Zhang and Sabuncu 2018, https://arxiv.org/abs/1805.07836; '
        'cross-entropy is reported',
    ),
    'mean_absolute_error': HeadRecipe(
        spec=spec(SurrogateHead, surrogate=CompSum(2.0)),
        cite=MAO,
        cost='o',
        exact=False,
        divided=False,
        notes='the loss with tau = 2, 1 - p(target); cross-entropy is reported',
    ),
    'label_robust': HeadRecipe(
        spec=spec(SurrogateHead, surrogate=LabelRobust(margin=0.1)),
        cite=ZHU,
        cost='o',
        exact=False,
        divided=False,
        notes='LDR-KL, scores as they are (the released code divides them by their mean absolute value); margin 0.1 is '
        'ours; cross-entropy is reported',
    ),
    'adaptive_label_robust': HeadRecipe(
        spec=spec(SurrogateHead, surrogate=LabelRobust(adapt=2.0)),
        cite=ZHU,
        cost='o',
        exact=False,
        divided=False,
        notes='ALDR-KL with temperatures found in one step and without the constant that depends on them alone; '
        'cross-entropy is reported',
    ),
    'arcface': HeadRecipe(
        spec=spec(ArcFaceHead),
        cite='Deng et al. 2019, https://arxiv.org/abs/1801.07698',
        cost='o',
        exact=False,
        notes='the margin is in training alone; the reported loss is that of cosines times 64, and not calibrated',
        small={'scale': 4.0},
    ),
    'fourier_head': HeadRecipe(
        spec=spec(FourierHead),
        cite='Gillman et al. 2025, https://arxiv.org/abs/2410.22269',
        cost='2 (k + 1), of k frequencies, and 4 (k + 1) o / d for the bins',
        divided=False,
        notes='classes are equal bins of a number from -1 to 1; a quarter as many frequencies as bins by default, and '
        'no penalty of roughness',
    ),
}
"""Every head over classes by the name that `head=` of the config long_range has for it."""
