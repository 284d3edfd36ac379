#!/bin/sh
# Renews requirements.lock (the newest versions that setup.cfg allows), requirements-oldest.lock (the oldest JAX) and the
# compilers for TPUs and GPUs that belong to them, then checks that every pin can be had for Python 3.12, 3.13 and 3.14.
set -eu
oldest=0.11.2
python=$("$(dirname "$0")/find_python.sh")
"$python" -m venv --clear .venv-lock
pip='.venv-lock/bin/python -m pip --disable-pip-version-check'
$pip install -qq setuptools -e '.[test]'

pins() {
    echo "# The full test environment, exact, for Python 3.12 to 3.14. $1"
    echo '# Regenerate with `make lock`.'
    $pip freeze --exclude-editable | sed 's/^uvloop==.*/&; platform_system != "Windows"/'
}
pins 'The newest versions that setup.cfg allows.' > requirements.lock
sed -e "s/^\(jax\|jaxlib\)==.*/\1==$oldest/" -e "s/The newest versions.*/As requirements.lock, with the oldest JAX of setup.cfg./" \
    requirements.lock > requirements-oldest.lock

# The compiler for TPUs that belongs to each JAX; see the Makefile.
tpu_pin() {
    rm -rf .venv-lock/tpu
    $pip install -qq --no-deps --target .venv-lock/tpu "jax==$1"
    wanted=$(sed -n 's/^Requires-Dist: \(libtpu[^;]*\);.*/\1/p' .venv-lock/tpu/jax-*.dist-info/METADATA)
    $pip install -qq --no-deps --target .venv-lock/tpu "$wanted"
    echo "# The compiler for TPUs of JAX $1; it serves tests. Regenerate with \`make lock\`."
    basename .venv-lock/tpu/libtpu-*.dist-info .dist-info | sed 's/-/==/'
}
newest=$(sed -n 's/^jax==//p' requirements.lock)
tpu_pin "$newest" > requirements-tpu.lock
tpu_pin "$oldest" > requirements-tpu-oldest.lock

# The compiler for GPUs: JAX's plugin for CUDA, of JAX's own version, and NVIDIA's assembler.
$pip install -qq --no-deps --target .venv-lock/cuda \
    "jax-cuda13-plugin==$newest" "jax-cuda13-pjrt==$newest" nvidia-cuda-nvcc nvidia-nvvm
{
    echo "# The compiler for GPUs of JAX $newest; it serves \`make compile-gpu\` and plans. Regenerate with \`make lock\`."
    for package in .venv-lock/cuda/*.dist-info; do
        basename "$package" .dist-info | sed 's/-/==/; s/_/-/g'
    done
} > requirements-cuda.lock

for version in 3.12 3.13 3.14; do
    for lock in requirements.lock requirements-oldest.lock; do
        # promise has no wheel: it is pure Python and is built on the spot.
        grep -v '^promise==' $lock > .venv-lock/wheels.txt
        $pip install -qq --dry-run --no-deps --ignore-installed --only-binary=:all: \
            --python-version $version --target .venv-lock/target -r .venv-lock/wheels.txt
        echo "$lock: Python $version has every version"
    done
done
rm -rf .venv-lock
