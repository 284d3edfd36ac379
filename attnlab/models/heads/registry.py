"""Named heads over a vocabulary, over classes and of real numbers: which class, which paper, what it claims."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from attnlab.config import spec
from attnlab.models.heads.adaptive import AdaptiveSoftmax
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.heads.contrastive import BlockContrastiveHead
from attnlab.models.heads.distributional import AtomsHead, ImplicitQuantiles
from attnlab.models.heads.evidential import EvidentialHead
from attnlab.models.heads.fourier import FourierHead
from attnlab.models.heads.gumbel import GumbelHead
from attnlab.models.heads.hierarchical import HierarchicalSoftmax
from attnlab.models.heads.language import BoundedHead, LanguageHead
from attnlab.models.heads.links import Evidence, LinkHead, SigSoftmax, Spherical, StableMax, Taylor
from attnlab.models.heads.margin import ArcFaceHead, PartialFC, WrappedCauchyHead
from attnlab.models.heads.masked import MaskedSoftmaxHead
from attnlab.models.heads.mixture import MixtureOfSoftmaxes
from attnlab.models.heads.multilabel import Decoupled, MultiLabelHead, SoftTopK
from attnlab.models.heads.noisy import NoisySoftmaxHead
from attnlab.models.heads.quantile import MixtureDensityHead, QuantileHead
from attnlab.models.heads.regression import RegressionHead
from attnlab.models.heads.sampled import AugmentAndReduce, SampledSoftmax
from attnlab.models.heads.surrogates import CompSum, LabelRobust, SurrogateHead, ZLoss
from attnlab.signature import checked_fields


@checked_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadRecipe:
    """One published head as data.

    Attributes:
      spec: the head, from `attnlab.config.spec`, made as `head(dim, vocab, rngs=rngs)`; a head of classes also takes
        `classes=`, and ignores `vocab`.
      cite: the paper, authors and year first, then the address.
      cost: how many inner products of width `d` the loss of a token takes in training; `o` is the vocabulary.
      normalised: claims that the probabilities of all classes sum to one and that the loss is minus the logarithm of
        the target's probability; never so for heads of real numbers.
      exact: claims that training minimises that loss, not an estimate of it or its sum with something else (see the
        notes).
      derived: claims that the gradient that training follows is the derivative of the number it reports; not so if a
        penalty is only in the gradient, or a number is held fixed.
      streams: claims that the loss and the prediction of a token depend on no hidden state but its own.
      divided: claims that its classes may be divided over devices, along the mesh axis `tensor`.
      notes: how the head departs from the paper.
      small: arguments for tests, with a vocabulary of a dozen tokens.
    """

    spec: ConfigDict
    cite: str
    cost: str
    normalised: bool = True
    exact: bool = True
    derived: bool = True
    streams: bool = True
    divided: bool = True
    notes: str = ''
    small: Mapping[str, Any] = MappingProxyType({})

    def made(self, **arguments: Any) -> ConfigDict:
        """A copy of the spec with these arguments."""
        made = self.spec.copy_and_resolve_references()
        with made.ignore_type():
            made.update(arguments)
        return made

    def reduced(self) -> ConfigDict:
        """The spec in sizes that suit a test."""
        return self.made(**self.small)


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
        derived=False,
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
        notes='a Huffman tree of the counts given, or of counts 1 / (j + 1); the likeliest tokens are found by '
        'best-first search, exactly, or by a beam; other temperatures than 0 and 1 compute all probabilities',
    ),
    'sampled_softmax': HeadRecipe(
        spec=spec(SampledSoftmax),
        cite='Jean et al. 2015, https://arxiv.org/abs/1412.2007',
        cost='n + 1, of n drawn tokens',
        exact=False,
        notes=f'{BY_FREQUENCY}; one draw for all tokens of a batch; evaluation is over the whole vocabulary',
        small={'negatives': 5},
    ),
    'augment_and_reduce': HeadRecipe(
        spec=spec(AugmentAndReduce),
        cite='Ruiz et al. 2018, https://arxiv.org/abs/1802.04220',
        cost='2 n + 1, of n drawn tokens twice',
        exact=False,
        derived=False,
        notes='the bound of the softmax; its free number is estimated from a second draw instead of being kept for '
        'every example; evaluation is over the whole vocabulary',
        small={'negatives': 5},
    ),
}
"""Every head over a vocabulary by the name that `head=` of a config and `attnlab zoo --heads` have for it."""

MAO = 'Mao, Mohri and Zhong 2023, https://arxiv.org/abs/2304.07288'
ZHU = 'Zhu, Ying and Yang 2023, https://arxiv.org/abs/2112.14869'
GUPTA = 'Gupta et al. 2024, https://arxiv.org/abs/2310.10636'

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
        derived=False,
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
    'partial_fc': HeadRecipe(
        spec=spec(PartialFC),
        cite='An et al. 2022, https://arxiv.org/abs/2203.15565',
        cost='o / 10, or the classes of the batch where they are more',
        exact=False,
        streams=False,
        notes='the classes of a batch are always kept, as in the released code; a tenth of the classes is ours (there '
        'it is all of them by default); the optimiser steps all centres; the loss over all '
        'classes is reported',
        small={'scale': 4.0, 'share': 0.5},
    ),
    'wrapped_cauchy': HeadRecipe(
        spec=spec(WrappedCauchyHead),
        cite='Han 2023, https://arxiv.org/abs/2305.18732',
        cost='o',
        notes='as the released code computes it: the scale is learned from 1.69 on, or given (250 there)',
    ),
    'noisy_softmax': HeadRecipe(
        spec=spec(NoisySoftmaxHead),
        cite='Chen, Deng and Du 2017, https://arxiv.org/abs/1708.03769',
        cost='o',
        exact=False,
        notes='without bias; a strength of 0.3, whose square is within the range that the paper tries; gradients flow '
        'through the norms; the loss without noise is reported',
    ),
    'gumbel': HeadRecipe(
        spec=spec(GumbelHead),
        cite='Alexandridis et al. 2022, https://arxiv.org/abs/2207.10936',
        cost='o',
        exact=False,
        divided=False,
        notes='binary cross-entropies are added up, and scores below -4 cut off as in the released code, which also '
        'cuts those above 10; predictions are divided by their sum, and their cross-entropy reported; without '
        'the objectness of a detector',
    ),
    'evidential_classes': HeadRecipe(
        spec=spec(EvidentialHead),
        cite='Sensoy, Kaplan and Kandemir 2018, https://arxiv.org/abs/1806.01768',
        cost='o',
        exact=False,
        divided=False,
        notes='concentrations 1 + softplus(x), where the paper has a ReLU; evidence for other classes is penalised by '
        '0.1, where the paper goes from 0 to 1 over ten epochs; the cross-entropy of the mean is reported',
    ),
    'nbc_softmax': HeadRecipe(
        spec=spec(BlockContrastiveHead),
        cite='Kulatilleke, Chandra and Portmann 2022, https://arxiv.org/abs/2212.08184',
        cost='o + e, of e projected channels',
        exact=False,
        streams=False,
        divided=False,
        notes='as the released code computes it, which pushes apart the means of the classes of a batch; a share of '
        '0.5 is ours; cross-entropy is reported',
    ),
    'masked_softmax': HeadRecipe(
        spec=spec(MaskedSoftmaxHead),
        cite='Kim, Kwon and Kim 2023, https://arxiv.org/abs/2309.14808',
        cost='o',
        exact=False,
        streams=False,
        divided=False,
        notes='the classes of the present task are those of the batch; cross-entropy over all classes is reported',
    ),
    'decoupled_softmax': HeadRecipe(
        spec=spec(MultiLabelHead, loss=Decoupled()),
        cite=GUPTA,
        cost='o',
        divided=False,
        notes='for several labels of an example; with one it is the softmax; scores of a linear map, where the paper '
        'compares embeddings',
    ),
    'soft_top_k': HeadRecipe(
        spec=spec(MultiLabelHead, loss=SoftTopK()),
        cite=GUPTA,
        cost='o',
        exact=False,
        divided=False,
        notes='k is the number of labels of an example; the decoupled softmax is reported; scores of a linear map',
    ),
    'z_loss': HeadRecipe(
        spec=spec(SurrogateHead, surrogate=ZLoss()),
        cite='de Brebisson and Vincent 2016, https://arxiv.org/abs/1604.08859',
        cost='o',
        exact=False,
        divided=False,
        notes='all scores are computed: the updates of the paper, whose cost does not depend on the number of classes, '
        'are not here; a = 1 and b = 0, as in its example; cross-entropy is reported, of scores whose scale is not '
        'trained',
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


REGRESSORS: dict[str, HeadRecipe] = {
    'squared_error': HeadRecipe(
        spec=spec(RegressionHead),
        cite='Hastie, Tibshirani and Friedman 2009, https://doi.org/10.1007/978-0-387-84858-7',
        cost='o',
        normalised=False,
        divided=False,
    ),
    'absolute_error': HeadRecipe(
        spec=spec(RegressionHead, error='absolute'),
        cite='Koenker and Bassett 1978, https://doi.org/10.2307/1913643',
        cost='o',
        normalised=False,
        divided=False,
        notes='the median, a quantile',
    ),
    'c51': HeadRecipe(
        spec=spec(AtomsHead),
        cite='Bellemare, Dabney and Munos 2017, https://arxiv.org/abs/1707.06887',
        cost='51 o',
        normalised=False,
        divided=False,
        notes='targets are numbers, where those of the paper are distributions; the loss is a cross-entropy between '
        'two atoms and the prediction, so that its least value is not 0',
        small={'atoms': 7, 'low': -2.0, 'high': 2.0},
    ),
    'iqn': HeadRecipe(
        spec=spec(ImplicitQuantiles, kappa=0.01),
        cite='Dabney et al. 2018, https://arxiv.org/abs/1806.06923',
        cost='8 (w + o), of w waves, for 8 levels drawn',
        exact=False,
        normalised=False,
        divided=False,
        notes='levels are drawn in training, and at equal distances otherwise; targets are numbers; a one beside the '
        'hidden state stands for the hidden layer after the product; kappa is 0.01, where the paper has 1 for returns: '
        'normalised targets spread over no more than that, and intervals would be too narrow',
        small={'waves': 6, 'levels': 5},
    ),
    'quantiles': HeadRecipe(
        spec=spec(QuantileHead),
        cite='Koenker and Bassett 1978, https://doi.org/10.2307/1913643',
        cost='7 o, of 7 levels',
        normalised=False,
        divided=False,
        notes='levels may cross in training, and are sorted where they are read; the prediction is the median',
        small={'levels': (0.2, 0.5, 0.9)},
    ),
    'mixture_density': HeadRecipe(
        spec=spec(MixtureDensityHead),
        cite='Bishop 1994, https://publications.aston.ac.uk/id/eprint/373',
        cost='9 o, of 3 components',
        normalised=False,
        divided=False,
        notes='outputs are independent of each other; 0.001 is added to deviations',
        small={'components': 2},
    ),
}
"""Every head of real numbers by the name that `head=` of the config long_range has for it in pretraining."""
