#!/usr/bin/env bash
# Run on a TPU what the tests can only run on CPU ranks, and print a table to paste into an issue.
#
#   tools/tpu_smoke.sh                      all checks, under 10 minutes on a v5e-8
#   tools/tpu_smoke.sh versions wrapper     some of them
#
# On a slice of several hosts start it on all of them at once, with SMOKE_DIR on a file system or a
# bucket that all of them see. PYTHON is the interpreter (default: python), SMOKE_TIMEOUT the seconds
# that one check may take (default: 120). With PJRT_DEVICE=CPU it runs on XLA_FSDP_NUM_RANKS CPU ranks.
# The exit code is the number of checks that failed.
set -u
case ${1-} in -h | --help)
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit ;;
esac
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python}
seconds=${SMOKE_TIMEOUT:-120}
logs=$(mktemp -d)
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}

examples="example_mnist example_llm"
checks=${*:-$("$python" tools/tpu_smoke.py list) $examples profile}

run_check() {
  local ranks=${XLA_FSDP_NUM_RANKS:+--num_ranks=$XLA_FSDP_NUM_RANKS}
  case $1 in
    example_mnist)
      "$python" examples/mnist/train.py --fake_data --num_epochs 1 --max_steps 30 --use_nested_fsdp \
        --compare_steps 0 --ckpt_dir "$logs/mnist" $ranks ;;
    example_llm)
      "$python" examples/llm/train.py --steps 40 --generate 0 $ranks ;;
    profile)
      "$python" examples/llm/train.py --steps 20 --generate 0 $ranks --profile "$logs/profile" &&
        find "$logs/profile" -name '*.xplane.pb' | grep . ;;
    *)
      "$python" tools/tpu_smoke.py "$1" ;;
  esac
}

export -f run_check
export python logs
failed=0
echo "| check | result | seconds | last line |"
echo "|---|---|---|---|"
for check in $checks; do
  begin=$(date +%s)
  timeout --kill-after=10 "$seconds" bash -c "run_check $check" >"$logs/$check.out" 2>"$logs/$check.err"
  code=$?
  if [ $code -eq 0 ]; then
    result=ok
    last=$(tail -n 1 "$logs/$check.out")
  else
    result="FAILED ($code)"
    last=$(grep -E '[A-Za-z]+(Error|Exception)|xla_fsdp' "$logs/$check.err" | tail -n 1)
    last=${last:-$(tail -n 1 "$logs/$check.err")}
    failed=$((failed + 1))
  fi
  echo "| $check | $result | $(($(date +%s) - begin)) | ${last:0:160} |" | tr '\n' ' '
  echo
done
[ $failed -eq 0 ] || echo "Whole outputs are in $logs."
exit $failed
