// Test the formatting of numbers. tests/page/test_page.py checks that the terminal report rounds in the same way.

import assert from "node:assert/strict";
import { test } from "node:test";

import { bandwidth, between, count, duration, exact, longDuration, messageOf, percent, perSecond, rate, signed, size, tick } from "../../lflops/page/lib/format.js";

test("an unknown value is a dash", () => {
  for (const format of [count, rate, bandwidth, size, duration, percent, signed]) assert.equal(format(null), "–");
});

test("counts are scaled by 1000 and bytes by 1024, with two decimals", () => {
  assert.deepEqual([0, 999, 1000, 1234567].map(count), ["0", "999", "1.00 k", "1.23 M"]);
  assert.deepEqual([1023, 1024, 1536, 2 ** 30].map(size), ["1023 B", "1.00 KiB", "1.50 KiB", "1.00 GiB"]);
  assert.deepEqual([rate(2e12), bandwidth(5e11)], ["2.00 TFLOP/s", "500.00 GB/s"]);
});

test("half of the last digit is rounded up, as integers do", () => {
  assert.deepEqual([1005, 1015, 999994, 999995].map(count), ["1.01 k", "1.02 k", "999.99 k", "1.00 M"]);
});

test("a count beyond 2^53 comes as digits and keeps them", () => {
  assert.equal(count("9007199254740993"), "9.01 P");
  assert.equal(exact("9007199254740993"), "9,007,199,254,740,993");
});

test("a long duration is said in two units", () => {
  assert.deepEqual([0.0767, 59.4, 60, 800.9, 8000].map(longDuration), ["76.7 ms", "59.4 s", "1 min 0 s", "13 min 20 s", "2 h 13 min"]);
});

test("a duration has the unit that fits", () => {
  assert.deepEqual([0, 1e-9, 2.5e-7, 0.0767, 1, 3600].map(duration), ["0 s", "1.00 ns", "250 ns", "76.7 ms", "1.00 s", "3600 s"]);
});

test("a share that is too small for a digit is no zero", () => {
  assert.deepEqual([0, 0.0004, -0.0004, 0.125, 2.5].map(percent), ["0 %", "<0.1 %", ">-0.1 %", "12.5 %", "250.0 %"]);
});

test("what a ratio adds has a sign, and an interval has two", () => {
  assert.deepEqual([1, 1.1, 0.9, 1.0001].map(signed), ["0 %", "+10.0 %", "-10.0 %", "<0.1 %"]);
  assert.equal(between({ low: 0.9, high: 1.25 }), "-10.0 % to +25.0 %");
  assert.equal(between({ low: null, high: null }), "–");
});

test("an axis has powers of ten", () => {
  assert.deepEqual([0.01, 1, 1e5, 2.5e6, 1e12].map((value) => tick(value)), ["0.01", "1", "100 k", "2.5 M", "1 T"]);
  assert.equal(tick(1e13, "FLOP/s"), "10 TFLOP/s");
});

test("an exact value is grouped, a fraction is not", () => {
  assert.deepEqual([null, 1234567, 0.25].map(exact), ["unknown", "1,234,567", "0.25"]);
});

test("an error that is none has a message as well", () => {
  assert.deepEqual([new Error("why"), "text"].map(messageOf), ["why", "text"]);
});

test("a rate of a time has three digits, as in the terminal", () => {
  assert.deepEqual([40.00000001, 50, 666.67, 999.6, 5270, 0.5, 0, null].map(perSecond), ["40.0", "50.0", "667", "1.00 k", "5.27 k", "0.50", "0", "–"]);
});
