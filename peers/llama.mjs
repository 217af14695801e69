// llama.cpp for `python -m benchmarks.cpu`: one JSON command a line on stdin, one JSON answer a line on stdout.
//
//   {"do": "about"}                                                -> {"about"}: which llama.cpp this is
//   {"do": "load", "path": FILE, "threads": N}                     -> {"about", "before_bytes", "after_bytes"}: resident memory
//                                                                     and {"process_bytes"}: all of the process's
//   {"do": "prefill", "ids": [...]}                                -> {"seconds"}
//   {"do": "decode", "prompts": [[...], ...], "num_tokens": N}     -> {"seconds", "replies": [[...], ...]}
//   {"do": "logits", "ids": [...], "into": FILE}                   -> {"rows", "columns"}: float32 in FILE, one row a token
//   {"error": TEXT} where a command failed
//
// benchmarks/cpu_worker.py answers the same commands. Token ids are taken as they are: nothing is put before them.
// Run it in a folder that has node-llama-cpp (make peers).

import {createRequire} from "node:module";
import {createInterface} from "node:readline";
import {writeFile} from "node:fs/promises";
import path from "node:path";
import {pathToFileURL} from "node:url";

// This script is not in the folder that has the package.
const entry = createRequire(path.join(process.cwd(), "package.json")).resolve("node-llama-cpp");
const {getLlama, getModuleVersion, LlamaLogLevel} = await import(pathToFileURL(entry).href);

let model;
let threads = 1;
const contexts = new Map(); // kept: a new one would touch new memory while it is timed

const seconds = async (work) => {
    const began = process.hrtime.bigint();
    await work();
    return Number(process.hrtime.bigint() - began) / 1e9;
};

// Mapped files included, V8's own heap not: the package reads the file's tokens into it, and llama.cpp needs none of that.
function residentBytes() {
    globalThis.gc?.();
    return process.memoryUsage.rss() - process.memoryUsage().heapTotal;
}

async function start(maxThreads) {
    const llama = await getLlama({build: "never", gpu: false, maxThreads, logLevel: LlamaLogLevel.error});
    return [llama, `node-llama-cpp ${await getModuleVersion()}, llama.cpp ${llama.llamaCppRelease.release}`];
}

async function about() {
    return {about: (await start(1))[1]};
}

async function load(command) {
    threads = command.threads;
    const [llama, about] = await start(threads);
    const before = residentBytes();
    model = await llama.loadModel({modelPath: command.path});
    const after = residentBytes();
    return {about, before_bytes: before, after_bytes: after, process_bytes: process.memoryUsage.rss()};
}

// Empty sequences in a context that has room for so many tokens in each.
async function sequences(count, tokens) {
    const size = 256 * Math.ceil(tokens / 256);
    const key = `${count} of ${size}`;
    if (!contexts.has(key)) {
        const context = await model.createContext({sequences: count, contextSize: size, threads: {ideal: threads, min: threads}});
        contexts.set(key, Array.from({length: count}, () => context.getSequence()));
    }
    const found = contexts.get(key);
    for (const sequence of found)
        await sequence.clearHistory();
    return found;
}

async function prefill({ids}) {
    const [sequence] = await sequences(1, ids.length + 1);
    return {seconds: await seconds(() => sequence.evaluateWithoutGeneratingNewTokens(ids))};
}

// Each step takes the last token of every sequence, all in one batch. Timed are the steps, not the prompts.
async function decode({prompts, num_tokens: numTokens}) {
    const longest = Math.max(...prompts.map((prompt) => prompt.length));
    const all = await sequences(prompts.length, longest + numTokens + 1);
    for (const [i, prompt] of prompts.entries())
        await all[i].evaluateWithoutGeneratingNewTokens(prompt.slice(0, -1));
    const streams = all.map((sequence, i) => sequence.evaluate(prompts[i].slice(-1), {temperature: 0, yieldEogToken: true}));
    const replies = prompts.map(() => []);
    const took = await seconds(async () => {
        for (let step = 0; step < numTokens; step++) {
            const next = await Promise.all(streams.map((stream) => stream.next()));
            next.forEach(({value}, i) => replies[i].push(value));
        }
    });
    await Promise.all(streams.map((stream) => stream.return()));
    return {seconds: took, replies};
}

async function logits({ids, into}) {
    const [sequence] = await sequences(1, ids.length + 1);
    let values, columns;
    const keep = (row, output) => {
        const found = output.next.logits; // by token
        columns ??= found.size;
        values ??= new Float32Array(ids.length * columns);
        for (const [token, logit] of found)
            values[row * columns + token] = logit;
        found.clear(); // all results are kept until the last one is there
    };
    const options = {generateNext: {logits: true, options: {temperature: 0}}};
    await sequence.controlledEvaluate(ids.map((id) => [id, options]), {onTokenResult: keep});
    await writeFile(into, new Uint8Array(values.buffer));
    return {rows: ids.length, columns};
}

const commands = {about, load, prefill, decode, logits};

for await (const line of createInterface({input: process.stdin})) {
    const command = JSON.parse(line);
    let answer;
    try {
        answer = await commands[command.do](command);
    } catch (error) {
        answer = {error: String(error?.message ?? error)};
    }
    process.stdout.write(JSON.stringify(answer) + "\n");
}
process.exit(0);
