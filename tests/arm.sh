#!/bin/sh
# Run tests of the native backend on a 64-bit Arm system that this x86 machine emulates: `make test-arm`. It needs root,
# and Debian's packages qemu-user-static and debootstrap. It shows whether results are right, never how fast they are.
#
#     tests/arm.sh FOLDER [TESTS]      FOLDER: for Debian and the Arm wheels, 2.5 GB, made once
set -eu
folder=$1
shift
root=$folder/root site=$folder/site binfmt=/proc/sys/fs/binfmt_misc

# In a container the package may not have told the kernel which programs qemu runs.
[ -e $binfmt/register ] || mount -t binfmt_misc binfmt_misc $binfmt
[ -e $binfmt/qemu-aarch64 ] || cat /usr/lib/binfmt.d/qemu-aarch64.conf > $binfmt/register

if [ ! -e "$folder/.ready" ]; then
	mkdir -p "$folder"
	debootstrap --arch=arm64 --variant=minbase --include=python3 bookworm "$root"
	mkdir -p "$root/src" "$root/site" "$root/dev/shm"
	# torch 2.10 is the last version whose Arm wheel on PyPI needs no CUDA. pip would judge what else is needed by this
	# machine, so every package is named: the pinned ones, without those that the tests do not import.
	grep -vE '^(torch|torchao|accelerate|bitsandbytes|llama_cpp_python|llguidance|mypy|ruff)==' constraints.txt |
		PIP_CONFIG_FILE=/dev/null python3 -m pip install --no-deps --target "$site" --python-version 3.11 \
			--implementation cp --only-binary=:all: --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
			--platform manylinux_2_26_aarch64 --platform manylinux2014_aarch64 --requirement /dev/stdin torch==2.10.0
	touch "$folder/.ready"
fi

native=tests/backends/native
[ $# -gt 0 ] || set -- $native/test_processor.py $native/test_products.py \
	$native/test_native_executor.py::test_logits_and_cache_are_those_of_the_stored_weights_in_float64 \
	$native/test_native_executor.py::test_distributions_are_those_of_the_logits_in_float64 \
	$native/test_invariance.py::test_ragged_batches_of_trees_and_chains \
	$native/test_invariance.py::test_a_draft_in_one_call_equals_one_pass_per_step
for features in "" "+dotprod,+i8mm,+bf16"; do # without and with the dot products of 8-bit integers
	echo "Arm, features: ${features:-none}"
	# The mounts end with the shell. Machine code is kept for the next run, by features.
	unshare --mount sh -c '
		root=$1 site=$2 features=$3
		shift 3
		mount --bind . "$root/src"
		mount --bind "$site" "$root/site"
		mount -t proc proc "$root/proc"
		mount --bind /sys "$root/sys"
		mount --bind /dev/shm "$root/dev/shm"
		exec chroot "$root" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/root PYTHONPATH=/src:/site \
			NUMBA_CPU_NAME=generic NUMBA_CPU_FEATURES="$features" NUMBA_CACHE_DIR="/var/tmp/kernels$features" \
			OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false \
			python3 -c "import os, pytest, sys; os.chdir(\"/src\"); sys.exit(pytest.main(sys.argv[1:]))" "$@"
	' sh "$root" "$site" "$features" "$@"
done
