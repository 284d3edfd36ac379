"""Wrong inputs at the command line: exit status 2 and one line, which names the thing and what would be right.

A row is a command, in which `{tmp}`, `{text}`, `{run}` and `{study}` are paths, and a part of the line. Nothing trains.
"""

import contextlib
import fcntl
import os
import pathlib
import pty
import shlex
import struct
import termios

import pytest

from attnlab.cli import COMMANDS, main
from attnlab.train.run import starts

ROOT = pathlib.Path(__file__).parents[2]
LANGUAGE = ROOT / 'configs' / 'language.py'
SMALL = (
    *('--config.steps=4', '--config.batch_size=2', '--config.length=16', '--config.model.dim=8'),
    *('--config.model.stack.depth=1', '--config.evals[0].tokens=64', '--compilation_cache='),
)
TRAIN = f'train --config={LANGUAGE}:zoo=mingru,data={{text}} --workdir={{tmp}}/new {" ".join(SMALL)}'
SWEEP = f'sweep --config={ROOT}/configs/sweeps/language.py:zoo=mingru --study={{tmp}}/new'
MIXER = 'model.stack.blocks[0].mixer'

FLAGS = [
    ('trian', "there is no command 'trian'; did you mean 'train'"),
    ('sample', "there is no command 'sample'; did you mean 'generate'?"),
    ('evaluate', "there is no command 'evaluate'; did you mean 'eval'?"),
    ('train', '--config is missing'),
    ('train --config=nothing.py --workdir={tmp}/new', 'there is no config file nothing.py'),
    ('train --config={run} --workdir={tmp}/new', 'is a run and no config file; attnlab train --from='),
    ('train --config={tmp} --workdir={tmp}/new', 'there is no config file'),
    ('train --config configs/language.py', 'flags are written --name=value'),
    (f'{TRAIN} --from {{tmp}}', 'flags are written --name=value, such as --from=RUN'),
    (f'{TRAIN} -from={{tmp}}', 'flags are written --name=value, such as --from=RUN'),
    (f'train --config={LANGUAGE}', '--workdir is missing'),
    (f'train --config={LANGUAGE} --config={LANGUAGE} --workdir={{tmp}}/new', '--config is given 2 times'),
    (f'train --config={LANGUAGE} --workdir={{tmp}}/a --workdir={{tmp}}/b', '--workdir is given 2 times; give it once'),
    (f'{TRAIN} --config.steps=3', '--config.steps is given 2 times'),
    (f'{TRAIN} --data_workers=-1', 'data_workers=-1'),
    (f'{TRAIN} --data_workers=two', "--data_workers is 'two'; it must be a whole number"),
    (f'{TRAIN} --cpu_devices=-2', 'cpu_devices=-2'),
    (f'{TRAIN} --cpu_devices=0', 'cpu_devices=0'),
    (f'{TRAIN} --coordinator=localhost:1', '--coordinator needs --processes and --process'),
    (f'{TRAIN} --processes=2 --process=0', '--processes and --process need --coordinator=HOST:PORT beside them'),
    ('eval --workdir={run} --process=1', '--processes and --process need --coordinator=HOST:PORT beside them'),
    (f'{SWEEP} --processes=2', '--processes and --process need --coordinator=HOST:PORT beside them'),
    (f'{TRAIN} --coordinator=localhost:1 --processes=2 --process=2', '--process is 2, of 2 processes'),
    (f'{TRAIN} --coordinator=localhost:1 --processes=0 --process=0', 'processes=0'),
    (f'{TRAIN} --no_such_flag', 'no_such_flag'),
    (f'{TRAIN} --config.optimizer.ema=1.5', 'ema of an optimizer is 1.5; it must be a decay above 0 and below 1'),
    (f'{TRAIN} word', "takes no argument 'word'"),
    (f'train --config={LANGUAGE} --workdir={{text}}', 'is a file; it must be a folder'),
    (f'train --config={LANGUAGE} --workdir={{text}}/run', 'text.txt is a file; it must be a folder'),
    (f'train --config={LANGUAGE}:zoo=nothing --workdir={{tmp}}/new', 'there is no zoo=nothing'),
    (f'train --config={LANGUAGE}:size=huge --workdir={{tmp}}/new', 'there is no size=huge'),
    (f'train --config={LANGUAGE}:data=huge --workdir={{tmp}}/new', "there is no data 'huge'"),
    (f'train --config={LANGUAGE}:tokens=words --workdir={{tmp}}/new', 'there is no tokens=words'),
    (f'train --config={LANGUAGE}:optimizer=adam --workdir={{tmp}}/new', "did you mean 'adamw'"),
    (f'train --config={LANGUAGE}:schedule=step --workdir={{tmp}}/new', 'there is no schedule=step'),
    (f'train --config={LANGUAGE}:residual=none --workdir={{tmp}}/new', 'there is no residual=none'),
    (f'train --config={LANGUAGE}:mixer=gla --workdir={{tmp}}/new', "the config takes no argument 'mixer'"),
    (f'train --config={LANGUAGE}:gla --workdir={{tmp}}/new', 'is not name=value'),
    (f'train --config={LANGUAGE}:zoo=os.path --workdir={{tmp}}/new', 'os.path'),
    (f'train --config={ROOT}/configs/recall.py:task=nothing --workdir={{tmp}}/new', 'there is no task=nothing'),
    (f'train --config={ROOT}/configs/grokking.py:method=none --workdir={{tmp}}/new', 'there is no method=none'),
    (f'train --config={ROOT}/configs/long_range.py:task=nothing --workdir={{tmp}}/new', 'there is no task=nothing'),
    (f'train --config={ROOT}/configs/long_range.py:protocol=finetune --workdir={{tmp}}/new', 'needs run=WORKDIR'),
    ('train --config={text} --workdir={tmp}/new', 'is no Python file'),
    ('eval', '--workdir is missing'),
    ('analyse --workdir={run} --distributed', 'distributed'),
    ('uncertainty --workdir={run} --coordinator=localhost:1', 'coordinator'),
    ('eval --workdir={tmp}/nothing', 'is not a run: it holds no config.json'),
    ('eval --workdir={text}', 'is a file; it must be a folder'),
    ('eval --workdir={study}', 'it is a study'),
    ('eval --workdir={run} --step=3', 'has no checkpoint of step 3; it has: 2, 4'),
    ('eval --workdir={run} --step=-1', 'step=-1'),
    ('eval --workdir={run} --tokens=0', 'tokens=0'),
    ('eval --workdir={run} --tokens=-5', 'tokens=-5'),
    ('eval --workdir={run} --tokens=many', "--tokens is 'many'; it must be a whole number"),
    ('eval --workdir={run} --examples=5', '--examples does not apply to LanguageModelling'),
    ('eval --workdir={run} --examples=0', 'examples=0'),
    ('eval --workdir={run} --multiples=0', "--multiples holds '0'"),
    ('eval --workdir={run} --multiples=1,x', "--multiples holds 'x'"),
    ('eval --workdir={run} --multiples=1.5', "--multiples holds '1.5'"),
    ('eval --workdir={run} --multiples=', '--multiples'),
    ('eval --workdir={run} --split=', '--split is empty; give it a value, or leave it out'),
    ('train --from= --workdir={tmp}/new', '--from is empty; give it a value, or leave it out'),
    (f'{TRAIN} --topology= --dry_run', '--topology is empty'),
    (f'{SWEEP} --devices=', '--devices is empty'),
    ('eval --workdir={run} --multiples=1,1', '--multiples'),
    ('eval --workdir={run} --multiples=100000', 'choose a shorter length or a longer text'),
    ('eval --workdir={run} --split=tset', "no split 'tset'; valid names: train, valid"),
    ('eval --workdir={run} --attention=none', 'attention'),
    ('eval --workdir={run} --attention=ssmax', 'there is nothing to replace'),
    ('eval --workdir={run} --ema', 'keeps no average of its parameters (config.optimizer.ema is None)'),
    ('eval {run}', 'takes no argument'),
    ('analyse --workdir={run} --rows=0', 'rows=0'),
    ('analyse --workdir={run} --bits=0', "--bits holds '0'"),
    ('analyse --workdir={run} --bits=a', "--bits holds 'a'"),
    ('analyse --workdir={run} --split=tset', "no split 'tset'"),
    ('generate --workdir={run} --ema', 'keeps no average of its parameters'),
    ('generate --workdir={run} --top_k=0', 'top_k=0'),
    ('generate --workdir={run} --min_p=2', '--min_p is 2.0; it must be a share from 0 to 1'),
    ('generate --workdir={run} --beam=2 --contrastive=1', '--beam and --contrastive are ways to continue; choose one'),
    ('generate --workdir={run} --beam=2 --top_p=0.5', '--top_p is for what is drawn; --beam searches'),
    ('generate --workdir={run} --contrastive=2', '--contrastive is 2.0; it must be from 0 to 1'),
    ('generate --workdir={run} --ahead=2', '--ahead is for --draft, which is not given'),
    ('generate --workdir={run} --regex=a --beam=2', '--beam and --regex are ways to continue; choose one'),
    ('generate --workdir={run} --regex=', '--regex is empty; give it a value, or leave it out'),
    ('generate --workdir={run} --regex=(a', "the pattern '(a' makes no automaton"),
    ('generate --workdir={run} --regex=aaaa --tokens=3', "no text of at most 3 tokens matches 'aaaa'"),
    ('generate --workdir={run} --tested=drawn', '--tested is for --regex or --grammar, neither of which is given'),
    ('generate --workdir={run} --grammar=', '--grammar is empty; give it a value, or leave it out'),
    ('generate --workdir={run} --grammar={tmp}/none', 'which cannot be read'),
    ('generate --workdir={run} --grammar={text}', 'the grammar is none in the notation of Lark'),
    ('generate --workdir={run} --grammar={text} --regex=a', '--regex and --grammar are ways to continue; choose one'),
    ('generate --workdir={run} --regex=a --tested=some', 'tested=some'),
    ('generate --workdir={run} --regex=a --tested=drawn --top_k=2', '--top_k needs --tested=all'),
    ('generate --workdir={run} --regex=a --tested=drawn --temperature=0', '--temperature=0 takes the likeliest'),
    ('generate --workdir={run} --prompts={tmp}/none', 'which cannot be read'),
    ('generate --workdir={run} --prompts={text} --prompt=a', '--prompt is one text and --prompts a file of them'),
    ('uncertainty --workdir={run} --alpha=1', '--alpha is 1.0; it must be above 0 and below 1'),
    ('uncertainty --workdir={run} --rows=3', 'rows=3'),
    ('uncertainty --workdir={run} --risk=some', 'risk=some'),
    ('uncertainty --workdir={run} --risk_level=0.2', '--risk_level is for --risk, which is not given'),
    ('uncertainty --workdir={run} --budget=1', '--budget is for --cascade, which is not given'),
    ('uncertainty --workdir={run} --risk=missed --risk_level=0', '--risk_level is 0.0; it must be above 0 and below 1'),
    ('uncertainty --workdir={run} --rows=4 --risk=missed', '2 rows that choose promise 0.333 at best: give --rows=18'),
    ('uncertainty --workdir={run} --decay=0', '--decay is 0.0; it must be above 0 and at most 1'),
    ('uncertainty --workdir={run} --split=train', '--fitted_split is train, which is the split that is reported'),
    ('uncertainty --workdir={run} --fitted_split=tset', "no split 'tset'"),
    ('quantize --workdir={run}', '--out is missing'),
    (
        'quantize --workdir={run} --out={tmp}/new',
        'nothing is quantized: give --weights, --inputs, --state or --softmax',
    ),
    ('quantize --workdir={run} --out={tmp}/new --weights=in4', "there is no format 'in4'; choose from intN"),
    (
        'quantize --workdir={run} --out={tmp}/new --state=int4 --feedback=4',
        '--feedback calibrates the rounding of weights',
    ),
    (
        'quantize --workdir={run} --out={tmp}/new --weights=int4 --rows=4',
        '--rows is for --budget, --inputs=fixed8, --softmax or --sparse',
    ),
    ('quantize --workdir={run} --out={tmp}/new --inputs=fixed1', 'bits is 1; it must be at least 2'),
    (
        'quantize --workdir={run} --out={tmp}/new --weights=int3,int4',
        'of several formats --budget chooses, and --each makes a run of every one',
    ),
    (
        'quantize --workdir={run} --out={tmp}/new --state=int4 --budget=4',
        '--budget is of bits of weights; give --weights',
    ),
    (
        'quantize --workdir={run} --out={tmp}/new --weights=int4 --budget=4',
        'chooses among formats, of which there are 1',
    ),
    (
        'quantize --workdir={run} --out={tmp}/new --weights=int3,int4 --budget=4 --feedback=4',
        '--feedback is for weights of one format',
    ),
    ('quantize --workdir={run} --out={tmp}/new --weights=int4 --ordered', '--ordered is for --feedback'),
    ('quantize --workdir={run} --out={tmp}/new --weights=int4 --feedback=0', 'feedback=0'),
    ('quantize --workdir={run} --out={tmp}/new --weights=int4 --feedback=1 --damping=-1', 'damping=-1'),
    ('quantize --workdir={run} --out={tmp}/new --weights=int1', 'bits is 1; it must be at least 2'),
    ('quantize --workdir={run} --out={tmp}/new --weights=cross8', 'rounds activations and stores nothing'),
    ('quantize --workdir={run} --out={run} --weights=int4', 'the run itself; give it a folder of its own'),
    ('quantize --workdir={tmp} --out={tmp}/new --weights=int4', 'is not a run'),
    ('generate --workdir={run} --temperature=nan', '--temperature is nan; it must be a number'),
    ('generate --workdir={run} --temperature=-1', 'temperature=-1'),
    ('generate --workdir={run} --temperature=warm', "--temperature is 'warm'; it must be a number"),
    ('generate --workdir={run} --top_p=0', '--top_p is 0.0'),
    ('generate --workdir={run} --top_p=nan', '--top_p is nan'),
    ('generate --workdir={run} --top_p=2', '--top_p is 2.0'),
    ('generate --workdir={run} --tokens=0', 'tokens=0'),
    ('generate --workdir={run} --prompt=', 'the prompt is empty'),
    ('generate --workdir={run} --draft=', '--draft is empty; give it a value, or leave it out'),
    ('generate --workdir={run} --seed=-1', 'seed=-1'),
    (f'generate --workdir={{run}} --seed={2**32}', 'seed='),
    (
        'generate --workdir={run} --step=last',
        "--step is 'last'; it must be the step of a checkpoint, a whole number; without --step the newest is taken",
    ),
    ('eval --workdir={run} --step=4.5', "--step is '4.5'; it must be the step of a checkpoint, a whole number"),
    (
        'train --from={run} --from_step=best --workdir={tmp}/new',
        "--from_step is 'best'; it must be the step of a checkpoint, a whole number; without --from_step the best fit",
    ),
    ('generate --workdir={run} --step=3', 'has no checkpoint of step 3'),
    ('generate --workdir={run} --prompt=a\udcff', 'is not UTF-8'),
    ('show', 'usage: attnlab show RUN'),
    ('show {run} {run}', 'usage: attnlab show RUN'),
    ('show {tmp}/nothing', 'is not a run'),
    ('show {text}', 'is not a run: it is a file; give the work directory'),
    ('show {study}', 'it is a study'),
    ('zoo nothing', "there is no recipe 'nothing'"),
    ('zoo gla mha', 'usage: attnlab zoo [NAME]'),
    ('zoo --format=html', 'format'),
    ('data prepare', 'usage: attnlab data prepare NAME'),
    ('data prepare nothing', 'nothing'),
    ('data prepare listops --workers=0', 'workers=0'),
    ('data fetch listops', 'usage: attnlab data prepare NAME'),
    ('compare', 'usage: attnlab compare RUN'),
    ('compare {tmp}/nothing', 'is neither a run nor a study'),
    ('compare {run} {run}', 'is named twice'),
    ('compare {run} --metric=nothing', "has no metric 'nothing'"),
    ('compare {run} --tolerance=-1', 'tolerance=-1'),
    ('compare {run} --tolerance=nan', '--tolerance is nan'),
    ('compare {run} --out={text}', 'is a file; it must be a folder'),
    ('compare {run} {study}', 'study'),
    ('compare {study} --by=beauty', 'beauty'),
    ('report', 'usage: attnlab report STUDY'),
    ('report {study} --out={text}', 'is a file; it must be a folder'),
    ('report {study} {run}', 'is not a run'),
    ('report {tmp}/nothing', 'is neither a run nor a study'),
    ('match', '--config is missing'),
    (f'match --config={LANGUAGE}', '--target is missing'),
    (f'match --config={LANGUAGE} --target=mha', '--recipes is missing'),
    (
        'match --config=language:size=tiny,zoo=gla --target=mha --recipes=mha --out={tmp}/o',
        '--config holds zoo=gla, which match gives for each of --recipes; leave it out',
    ),
    (f'match --config={LANGUAGE} --target=mha --recipes=nothing --out={{tmp}}/o', 'there is no zoo=nothing'),
    (
        f'match --config={LANGUAGE}:size=tiny --target=100000 --recipes=3*gla+mha --out={{tmp}}/o',
        "--recipes has '3*gla+mha'; a recipe is a row of the zoo, which says what sizes may be adjusted; ",
    ),
    (f'match --config={LANGUAGE}:size=tiny --target=beauty --recipes=mha --out={{tmp}}/o', 'beauty'),
    (f'match --config={LANGUAGE}:size=tiny --target=mha --by=beauty --recipes=mha --out={{tmp}}/o', 'beauty'),
    (f'match --config={LANGUAGE} --target=mha --recipes=mha --tolerance=nan --out={{tmp}}/o', '--tolerance is nan'),
    (f'match --config={LANGUAGE} --target=mha --recipes=mha --out={{text}}', 'is a file; it must be a folder'),
    ('sweep nothing', 'there is no command sweep nothing'),
    ('sweep', '--config is missing'),
    (
        f'sweep --config={LANGUAGE} --study={{tmp}}/new',
        f'{LANGUAGE} is the config of a run; a sweep of it is --config=sweeps/language',
    ),
    (
        'sweep --config=recall:zoo=gla --study={tmp}/new',
        'is the config of a run; a sweep of it is --config=sweeps/recall:zoo=gla',
    ),
    (
        'sweep --config=dynamics --study={tmp}/new',
        'a sweep of it is one of sweeps/: activations, images, language, recall, series, of',
    ),
    (
        'train --config=sweeps/language:zoo=gla --workdir={tmp}/new --config.steps=3',
        'is the config of a sweep: attnlab sweep --config=sweeps/language:zoo=gla --study=DIR',
    ),
    (f'{SWEEP} --workers=0', 'workers=0'),
    (f'{SWEEP} --devices=x', "--devices holds 'x'"),
    (f'{SWEEP} --launcher=magic', 'magic'),
    (f'{SWEEP} --stopped_status=256', 'stopped_status=256'),
    (f'{SWEEP} --config.trials=0', 'trials is 0'),
    (f'{SWEEP} --config.confirm=-1', 'confirm is -1'),
    (f'{SWEEP} --config.goal=up', "config.goal is 'up'"),
    (f'{SWEEP},trials=x'.replace(' --study', ',trials=x --study').removesuffix(',trials=x'), 'trials'),
    (f'sweep --config={ROOT}/configs/sweeps/language.py --study={{text}}', 'is a file; it must be a folder'),
    (f'sweep --config={ROOT}/configs/sweeps/language.py --study={{run}}', 'it is not a study'),
    (f'sweep --config={ROOT}/configs/sweeps/language.py:zoo=mha --study={{study}}', 'holds a study of another sweep'),
    (
        f'sweep --config={ROOT}/configs/sweeps/series.py:system=linear --config.trials=2 --study={{tmp}}/new',
        'config.trials is 2; the grid and its seeds have 5, which None stands for',
    ),
    ('sweep status', '--study is missing'),
    ('sweep status --study={tmp}/nothing', 'is not a study'),
    ('sweep status --study={run}', 'is not a study'),
    ('sweep status --study={study} --storage=x', 'has its trials in a journal'),
    (f'sweep --config={ROOT}/configs/sweeps/language.py:trails=3 --study={{tmp}}/new', "did you mean 'trials'"),
    (
        f'train --config={LANGUAGE}:size=125m --config.rows_at_once=0 --workdir={{tmp}}/new',
        'rows_at_once is 0; it must',
    ),
    (f'train --config={LANGUAGE}:size=125m --config.rows_at_once=None --workdir={{text}}', 'is a file; it must be a'),
    (f'{TRAIN} --config.start=nothing', 'start'),
    (f'experiment {ROOT}/experiments/grokkin', "did you mean 'grokking'"),
    ('completion pwsh', "there is no completion for 'pwsh'"),
    ('config', '--config is missing'),
    ('config --config=language:zoo=glaa', "there is no zoo=glaa; did you mean 'gla'"),
    ('sweep worker', '--study is missing'),
    ('sweep worker --study={tmp}/nothing', 'is not a study'),
    ('sweep worker --study={study} --idle=nan', '--idle is nan'),
    ('sweep worker --study={study} --cores=x', "--cores holds 'x'"),
    ('sweep worker --study={study} --cores=99999', '--cores has 99999; the cores that this process may use are '),
    (
        f'sweep --config={ROOT}/configs/sweeps/language.py --config.sampler=attnlab.train.schedule.Cosine '
        '--study={tmp}/new',
        'of type Cosine; it must be Sampler',
    ),
    ('eval --workdir={run} --allow=nothing.py', 'there is no such file'),
    ('eval --workdir={run} --allow=a-b', '--allow names'),
]
"""Commands that are wrong in themselves."""

OVERRIDES = [
    ('model.dim=0', 'config.model.dim is 0; it must be a whole number of at least 1'),
    ('model.dim=-8', 'config.model.dim is -8'),
    ('model.dim=8.5', "config.model.dim is '8.5', of type str; it must be int"),
    ('model.stack.depth=0', 'config.model.stack.depth is 0'),
    ('model.stack.loop=sometimes', 'loop'),
    ('model.stak.depth=2', 'did you mean'),
    (f'{MIXER}.heads=0', 'no key'),
    (f'{MIXER}.window=-1', 'no key'),
    ('model.head=7', 'it is a part'),
    ('model.head=os.system', 'os.system'),
    ('model.stack.blocks[3].mixer.heads=2', 'no key'),
    ('steps=0', 'config.steps is 0; it must be a whole number of at least 1'),
    ('steps=-1', 'config.steps is -1'),
    ('steps=99999999999', 'it must be a whole number of at least 1, below 2^31'),
    ('steps=many', "config.steps is 'many'"),
    ('batch_size=0', 'config.batch_size is 0'),
    ('length=0', 'config.length is 0'),
    ('length=1000000', 'choose a shorter length'),
    ('accumulate=0', 'config.accumulate is 0'),
    ('accumulate=3', 'does not divide into config.accumulate=3'),
    ('seed=-1', 'config.seed is -1'),
    (f'seed={2**32}', 'config.seed is'),
    ('precision.activations=float33', "config.precision.activations is 'float33'; did you mean 'float32'"),
    ('precision.matmul=best', "config.precision.matmul is 'best'"),
    ('evals[0].cadence.n=0', 'config.evals[0].cadence.n is 0'),
    ('evals[0].tokens=-1', 'config.evals[0].tokens is -1'),
    ('evals[0].split=tset', "no split 'tset'"),
    ('evals[0].multiples=(1,2.5)', 'config.evals[0].multiples[1] is 2.5, of type float; it must be int'),
    ('evals[0].multiples=(0,)', 'multiples of HeldOut is (0,); it must hold one or more whole numbers of at least 1'),
    ('report.every=0', 'config.report.every is 0'),
    ('checkpoint.every=0', 'config.checkpoint.every is 0'),
    ('checkpoint.keep=0', 'config.checkpoint.keep is 0'),
    ('optimizer.peak_lr=nan', 'config.optimizer.peak_lr is nan; it must be a number'),
    ('optimizer.peak_lr=inf', 'peak_lr'),
    ('optimizer.overrides=(1,)', 'config.optimizer.overrides[0] is 1, of type int; it must be Override'),
    ('optimizer=attnlab.train.optimizer.Optimizer', 'of which there are kinds, and none in general'),
    ('optimizer.schedule.warmup=inf', 'warmup is inf; it must be a fraction of the run'),
    ('optimizer.peak_lr=-1', 'an optimizer needs peak_lr above 0'),
    ('optimizer.peak_lr=0', 'an optimizer needs peak_lr above 0'),
    ('optimizer.weight_decay=-1', 'weight_decay'),
    ('optimizer.weight_decay=nan', 'config.optimizer.weight_decay is nan'),
    ('optimizer.clip=0', 'clip above 0'),
    ('optimizer.b1=1', 'b1'),
    ('optimizer.b2=-1', 'b2'),
    ('optimizer.eps=-1', 'eps'),
    ('optimizer.schedule.warmup=2.5', 'warmup is 2.5'),
    ('optimizer.schedule.warmup=nan', 'warmup is nan'),
    ('optimizer.schedule.warmup=100', 'which are too few for'),
    ('optimizer.schedule.final=2', 'final is 2'),
    ('optimizer.schedule=attnlab.nothing.Such', 'which cannot be imported'),
    ('mesh.data=3', 'needs'),
    ('mesh.expert=-2', 'the sizes of a mesh must be at least 1'),
    ('mesh.data=0', 'the sizes of a mesh must be at least 1'),
    ('mesh.fsdp=x', "config.mesh.fsdp is 'x'"),
    ('task.text.path=/nowhere', 'there is no text corpus at /nowhere'),
    ('task.text.valid_fraction=2', 'valid_fraction'),
    ('task.text.encoding=morse', 'encoding'),
    ('nothing=1', 'the config has no key nothing; it has accumulate, batch_size, '),
    ('steps', 'has no value'),
]
"""Overrides of a run's config."""

MHA = [
    ('heads=0', 'heads is 0'),
    ('heads=-4', 'heads is -4'),
    ('heads=3', 'heads'),
    ('kv_heads=3', 'kv_heads'),
    ('window=0', 'window is 0'),
    ('window=-1', 'window is -1'),
    ('sinks=-1', 'sinks is -1'),
    ('key_dim=0', 'key_dim is 0'),
    ('key_dim=3', 'a head has 3 channels, of which rotary positions turn 3 (fraction 1.0); that must be an even whole'),
    ('implementation=xl', f"config.{MIXER}.implementation is 'xl'; did you mean 'xla'?"),
    ('weights.soft_cap=-1', f'config.{MIXER}.weights: Softmax: soft_cap is -1.0; expected a positive, finite number'),
    ('weights.soft_cap=inf', f'config.{MIXER}.weights: Softmax: soft_cap is inf; expected a positive, finite number'),
    ('window=wide', "window is 'wide'"),
]
"""Overrides of an attention layer."""


@pytest.mark.parametrize(('command', 'sentence'), FLAGS)
def test_commands(place, capsys, command, sentence):
    refused(place, capsys, command, sentence)


@pytest.mark.parametrize(('override', 'sentence'), OVERRIDES)
def test_overrides(place, capsys, override, sentence):
    key = f'--config.{override.partition("=")[0]}='
    kept = ' '.join(item for item in TRAIN.split(' ') if not item.startswith(key))
    refused(place, capsys, f'{kept} --config.{override}', sentence)
    assert not (place['tmp'] / 'new').exists()


@pytest.mark.parametrize(('override', 'sentence'), MHA)
def test_overrides_of_attention(place, capsys, override, sentence):
    refused(place, capsys, f'{TRAIN.replace("mingru", "mha")} --config.{MIXER}.{override}', sentence)
    assert not (place['tmp'] / 'new').exists()


def test_a_terminal_breaks_no_word_of_a_line(monkeypatch):
    read, write = pty.openpty()
    fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 40, 0, 0))
    with open(write, 'w') as terminal, monkeypatch.context() as patch:
        patch.setattr('sys.stderr', terminal)
        assert main(['eval', '--workdir=nothing/of/such/a/name']) == 2
    written = b''
    with contextlib.suppress(OSError):  # Of a terminal that is closed and has been read to its end.
        while part := os.read(read, 4096):
            written += part
    os.close(read)
    shown = written.decode().replace('\r', '')
    sentence = 'attnlab: nothing/of/such/a/name is not a run: it holds no config.json'
    assert shown.count('\n') == 2 and shown.split() == sentence.split()
    assert max(map(len, shown.splitlines())) <= 40


def refused(place, capsys, command, sentence):
    assert main([word.format_map(place) for word in shlex.split(command)]) == 2
    error = capsys.readouterr().err
    assert error.startswith('attnlab: ') and sentence in error, error
    assert 'Traceback' not in error and error.count('\n') < 4


@pytest.mark.parametrize('command', [*COMMANDS, 'sweep worker', 'sweep status'])
def test_help(capsys, command):
    assert main([*command.split(), '--help']) == 0
    assert f'usage: attnlab {command}' in capsys.readouterr().out


def test_a_recipe_that_packs_no_documents_trains_and_a_stack_too_shallow_for_its_pattern_says_so(place, capsys):
    command = TRAIN.replace('mingru', 'window_sinks+mingru').replace('steps=4', 'steps=2')
    command = command.replace('{tmp}/new', '"{tmp}/a run"')
    assert main([word.format_map(place) for word in shlex.split(command)]) == 0
    sentence = 'no layer is DiagonalRecurrence: config.model.stack.depth is 1, the pattern has 2 layers'
    shown = capsys.readouterr().out
    assert sentence in shown and f"Next: attnlab eval --workdir='{place['tmp']}/a run'" in shown
    assert starts(place['tmp'] / 'a run')[-1]['missing_layers'] == [sentence]


def test_without_a_terminal_the_zoo_is_a_line_a_recipe(capsys):
    assert main(['zoo']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith('sliding_window\t') for line in lines)
    assert len({line.count('\t') for line in lines}) == 1
