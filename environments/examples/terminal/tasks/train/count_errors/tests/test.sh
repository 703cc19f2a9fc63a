#!/bin/bash
if [ "$(tr -d ' \n' < /app/count.txt)" = 6 ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
