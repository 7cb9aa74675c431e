// emulator_warp.h - (models to come)
#pragma once
