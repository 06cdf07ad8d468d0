#!/bin/sh
# The job of jobset.yaml by XPK, which has no file of its own for a workload: it writes a JobSet, here
# into xpk-jobset.yaml. Set CLUSTER, IMAGE and BUCKET before.
xpk workload create --cluster $CLUSTER --workload llm --tpu-type=v5litepod-16 --num-slices=2 \
  --docker-image $IMAGE --termination-grace-period-seconds=300 --max-restarts=100 \
  --output-manifest-file=xpk-jobset.yaml --command "python examples/llm/train.py \
  --config=examples/llm/small.yaml --mesh=replica=2,shard=16 --ckpt_dir=gs://$BUCKET/llm --resume=auto"
