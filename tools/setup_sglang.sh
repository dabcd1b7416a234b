#!/usr/bin/env bash
# Make an environment in which the real SGLang serves on a machine without a GPU, for the tests marked sglang.
#   setup_sglang.sh [FOLDER]     FOLDER: default $GYRE_SGLANG, else ~/.local/share/gyre/sglang-0.5.21
# 2.8 GB, about 5 minutes. On a GPU machine install sglang itself instead (docs/sglang.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=0.5.21
folder=${1:-${GYRE_SGLANG:-$HOME/.local/share/gyre/sglang-$version}}
requirements=gyre_hpc/engines/sglang/cpu/requirements.txt
want="$version $(sha256sum <$requirements | cut -c1-16)"
[ "$(cat "$folder/installed" 2>/dev/null)" = "$want" ] && exit 0
"${PYTHON:-python3}" -c 'import platform, sys
ok = (3, 11) <= sys.version_info[:2] <= (3, 13) and tuple(map(int, platform.libc_ver()[1].split("."))) >= (2, 34)
sys.exit(not ok)' || {
  echo "sglang $version has wheels for Python 3.11 to 3.13 and glibc 2.34 or newer; set PYTHON=/path/to/python3.11, or use a container" >&2
  exit 2
}
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
pip="$folder/bin/pip install --quiet --disable-pip-version-check"
$pip 'torch==2.13.0'
$pip -r "$requirements" 'torch==2.13.0'
$pip --no-deps 'torchvision==0.28.0' "sglang==$version"
echo "$want" >"$folder/installed"
