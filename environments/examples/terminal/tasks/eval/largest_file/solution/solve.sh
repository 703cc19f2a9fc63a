#!/bin/bash
ls -S /app/parts | head -n 1 > /app/largest.txt
