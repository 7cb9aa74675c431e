// emulator_hopper.h - (models to come)
#pragma once
