// The clients `openai`, `@anthropic-ai/sdk`, and `ai` with `@ai-sdk/openai` and `@ai-sdk/openai-compatible`.
// Arguments: URL, key, model, seconds that each case is repeated for. Prints a JSON object for each case.

import { readFileSync } from 'node:fs';

import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import Anthropic from '@anthropic-ai/sdk';
import * as ai from 'ai';
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { z } from 'zod';

const [url, key, model, seconds] = process.argv.slice(2);
const messages = [{ role: 'user', content: 'count' }];
const greedy = { model, temperature: 0, max_tokens: 40 };
const schema = { type: 'object', properties: { on: { type: 'boolean' } }, required: ['on'], additionalProperties: false };

// counted checks the weights version of each token of a greedy completion (see counting.py).
function counted(ids, spans) {
  assert.equal(spans[0].start, 0);
  assert.equal(spans.at(-1).end, ids.length);
  for (const { version, start, end } of spans) {
    for (let at = Math.max(1, start); at < end; at++) {
      const stride = (ids[at] - ids[at - 1] + 94) % 94;
      assert.equal(stride, 1 + (version % 7), `token ${at} of ${ids} is not of version ${version}`);
    }
  }
}

const characters = (text) => [...text].map((c) => c.charCodeAt(0) - 33);
const version = (name) => JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version;

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, timeout: 120_000 });
const anthropic = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0, timeout: 120_000 });
const settings = { maxRetries: 0, temperature: 0, maxOutputTokens: 40, prompt: 'count' };

// sdk is the cases of a provider of the `ai` SDK.
const sdk = (policy) => ({
  async generateText() {
    const done = await ai.generateText({ model: policy, ...settings });
    assert.equal(done.text.length, 40);
    assert.equal(done.usage.outputTokens, 40);
    assert.equal(done.finishReason, 'length');
  },
  async streamText() {
    const errors = [];
    const done = ai.streamText({ model: policy, ...settings, onError: ({ error }) => errors.push(error) });
    let text = '';
    for await (const piece of done.textStream) text += piece;
    assert.deepEqual(errors, []);
    assert.equal(text.length, 40);
  },
  async generateObject() {
    const done = await ai.generateText({
      model: policy, ...settings, maxOutputTokens: 400, output: ai.Output.object({ schema: z.object({ on: z.boolean() }) }),
    });
    assert.equal(typeof done.output.on, 'boolean');
  },
  async tools() {
    const tools = { switch: ai.tool({ description: 'a lamp', inputSchema: z.object({ on: z.boolean() }), execute: async () => 'done' }) };
    const done = await ai.generateText({
      model: policy, ...settings, maxOutputTokens: 400, tools, toolChoice: 'required', providerOptions: oneCall, stopWhen: ai.stepCountIs(2),
      prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: 'none' } : {}),
    });
    assert.equal(typeof done.steps[0].toolCalls[0].input.on, 'boolean');
    assert.equal(done.steps[0].toolResults[0]?.output, 'done', JSON.stringify(done.steps[0].response));
    assert.equal(done.steps.length, 2);
  },
});

// a model with random weights may otherwise write calls up to its limit
const oneCall = { openai: { parallelToolCalls: false }, rollout: { parallel_tool_calls: false } };
const provider = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });
const compatible = createOpenAICompatible({ name: 'rollout', baseURL: `${url}/v1`, apiKey: key, supportsStructuredOutputs: true });

const clients = {
  [`openai (Node) ${version('openai')}`]: {
    async models() {
      const found = [];
      for await (const one of openai.models.list()) found.push(one.id);
      assert.ok(found.includes(model));
    },
    async chat() {
      const done = await openai.chat.completions.create({ messages, ...greedy, n: 2, logprobs: true, return_token_ids: true });
      for (const choice of done.choices) {
        counted(choice.token_ids, choice.weight_versions);
        assert.deepEqual(characters(choice.message.content), choice.token_ids);
      }
    },
    async streamedChat() {
      const stream = openai.chat.completions.stream({ messages, ...greedy, stream_options: { include_usage: true } });
      let spans;
      stream.on('chunk', (chunk) => { spans = chunk.choices[0]?.weight_versions ?? spans; });
      const done = await stream.finalChatCompletion();
      counted(characters(done.choices[0].message.content), spans);
      assert.equal(done.usage.completion_tokens, 40);
    },
    async manyAtOnce() {
      await Promise.all(Array.from({ length: 32 }, async (_, number) => {
        const asked = [{ role: 'user', content: `count ${number}` }];
        const done = await openai.chat.completions.create({ messages: asked, ...greedy, return_token_ids: true });
        counted(done.choices[0].token_ids, done.choices[0].weight_versions);
      }));
    },
    async tools() {
      const done = await openai.chat.completions.create({
        messages, ...greedy, max_tokens: 400, tool_choice: 'required', tools: [{ type: 'function', function: { name: 'switch', parameters: schema, strict: true } }],
      });
      assert.equal(typeof JSON.parse(done.choices[0].message.tool_calls[0].function.arguments).on, 'boolean');
    },
    async completions() {
      const done = await openai.completions.create({ prompt: 'ab', ...greedy, logprobs: 1, return_token_ids: true });
      counted(done.choices[0].token_ids, done.choices[0].weight_versions);
    },
    async responses() {
      const first = await openai.responses.create({ model, input: 'count', max_output_tokens: 40 });
      const second = await openai.responses.create({ model, input: 'more', previous_response_id: first.id, max_output_tokens: 40 });
      assert.equal((await openai.responses.retrieve(second.id)).output_text, second.output_text);
      const events = [];
      for await (const event of await openai.responses.create({ model, input: 'count', max_output_tokens: 40, stream: true })) events.push(event.type);
      assert.equal(events[0], 'response.created');
    },
    async errors() {
      await assert.rejects(openai.completions.create({ model: 'another', prompt: 'a' }), OpenAI.NotFoundError);
      await assert.rejects(openai.completions.create({ model, prompt: 'a', temperature: -1 }), OpenAI.BadRequestError);
    },
  },
  [`anthropic (Node) ${version('@anthropic-ai/sdk')}`]: {
    async messages() {
      const done = await anthropic.messages.create({ messages, ...greedy, return_token_ids: true });
      counted(done.token_ids, done.weight_versions);
    },
    async streamed() {
      const done = await anthropic.messages.stream({ messages, ...greedy }).finalMessage();
      assert.equal(done.content[0].text.length, 40);
    },
    async tools() {
      const done = await anthropic.messages.create({
        messages, ...greedy, max_tokens: 400, tools: [{ name: 'switch', input_schema: schema }], tool_choice: { type: 'tool', name: 'switch' },
      });
      assert.equal(typeof done.content.at(-1).input.on, 'boolean');
    },
    async errors() {
      await assert.rejects(anthropic.messages.create({ messages, ...greedy, model: 'another' }), Anthropic.NotFoundError);
    },
  },
  [`ai ${version('ai')}, responses`]: sdk(provider.responses(model)),
  [`ai ${version('ai')}, chat`]: sdk(provider.chat(model)),
  [`ai ${version('ai')}, openai-compatible`]: sdk(compatible.chatModel(model)),
};

for (const [client, cases] of Object.entries(clients)) {
  for (const [name, run] of Object.entries(cases)) {
    const end = Date.now() + 1000 * Number(seconds);
    let times = 0;
    let error = '';
    try {
      do {
        await run();
        times++;
      } while (Date.now() < end);
    } catch (failure) {
      error = `${failure.name}: ${failure.message}`;
      console.error(client, name, failure);
    }
    console.log(JSON.stringify({ client, case: name, times, error }));
  }
}
