#!/bin/bash
if [ "$(cat /app/first.txt)" = "A river runs below the town." ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
