//go:build browser

package gateway_test

import (
	"context"
	"flag"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/apikey"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

var screenshot = flag.String("screenshot", "", "file (PNG) for a picture of the page")

// browse opens a page of a new headless Chromium, and fails the test for every exception and every
// violation of the content policy.
func browse(t *testing.T) context.Context {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatal("chromium is not on PATH: install the package chromium")
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.WindowSize(1100, 640))
	ctx, cancel := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	messages := chromedp.Console(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for message, err := range messages {
			if err == nil && (message.IsException() || strings.Contains(message.Text, "Content Security Policy")) {
				t.Errorf("%s", message)
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return ctx
}

// holds waits until a JavaScript expression is true.
func holds(expression string) chromedp.Action[chromedp.Void] {
	return chromedp.Poll[chromedp.Void](expression)
}

func evaluate(script string) chromedp.Action[chromedp.Void] {
	return chromedp.Evaluate[chromedp.Void](script + "; true")
}

// speaker is a worker that samples tokens with one weights version.
func speaker(version uint64, tokens ...string) *fakeWorker {
	return &fakeWorker{model: "tiny", version: version, generate: func(req *inferencev1.GenerateRequest, stream grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
		for i, text := range tokens {
			said := token{text: text, delta: &inferencev1.MessageDelta{Content: text}}
			piece := said.piece(req, i)
			piece.WeightsVersion, piece.RawLogprobs = proto.Uint64(version), []float32{-0.04 * float32(i*i*i%40)}
			if i == len(tokens)-1 {
				last(req, 0, piece)
				piece.VersionSpans = []*trajectoryv1.VersionSpan{{Version: version, End: uint32(len(tokens))}}
			}
			if err := stream.Send(piece); err != nil {
				return err
			}
		}
		return nil
	}}
}

const message = chromedp.ID("message")

func TestPlaygroundInABrowser(t *testing.T) {
	ring, key := keyring(t, apikey.Sample)
	older, newer := speaker(11, "The", " answer", " might", " be", " 5", "."), speaker(12, "2", "+", "2", " is", " 4", ".")
	s, _ := serve(t, gateway.Config{Keys: ring}, older, newer)
	ctx := browse(t)
	do := func(what string, actions ...chromedp.Action[chromedp.Void]) {
		t.Helper()
		if err := chromedp.Do(ctx, actions...); err != nil {
			page, _ := chromedp.Run(ctx, chromedp.Evaluate[string]("document.body.innerText"))
			t.Fatalf("%s: %v\n%s", what, err, page)
		}
	}
	setKey := func(value string) chromedp.Action[chromedp.Void] {
		return evaluate(`{const key = document.getElementById('key'); key.value = '` + value + `'; key.dispatchEvent(new Event('change'))}`)
	}
	do("a refused key", chromedp.Navigate(s.URL()+"/"), setKey("wrong"),
		holds(`!document.getElementById('error').hidden && document.getElementById('error').innerText.includes('401')`))
	do("a valid key", setKey(key), holds(`document.getElementById('error').hidden && document.querySelector('.model').value === 'tiny'`),
		holds(`[...document.querySelector('.version').options].map(o => o.value).join() === ',12,11'`))

	do("a chat", chromedp.SendKeys(message, "What is 2+2?"+kb.Enter),
		holds(`document.querySelectorAll('.token').length > 1 && !document.getElementById('send').disabled`),
		holds(`[...document.querySelectorAll('.token')].every(t => t.style.backgroundColor && t.dataset.version)`))
	do("the alternatives of a token by keyboard", chromedp.Focus(chromedp.CSS(".log")), chromedp.KeyEvent(kb.ArrowRight), chromedp.KeyEvent(kb.ArrowRight),
		holds(`!document.getElementById('tip').hidden && document.querySelectorAll('#tip tr').length > 1 && document.getElementById('tip').innerText.includes('sampled, v')`))

	do("two versions next to each other", evaluate(`document.getElementById('clear').click(); document.getElementById('compare').click()`),
		evaluate(`document.querySelectorAll('.version').forEach((v, i) => { v.value = ['11', '12'][i] })`),
		evaluate(`{const color = document.getElementById('color'); color.value = 'version'; color.dispatchEvent(new Event('change'))}`),
		chromedp.SendKeys(message, "What is 2+2?"+kb.Enter),
		holds(`[...document.querySelectorAll('.log')].every(l => l.querySelectorAll('.token').length > 1) && !document.getElementById('send').disabled`))
	for _, w := range []*fakeWorker{older, newer} {
		w.mu.Lock()
		if w.last.WeightsVersion == nil || w.last.GetWeightsVersion() != w.version || w.last.GetParams().GetTopLogprobs() != 5 {
			t.Errorf("the worker with version %d got %v", w.version, w.last)
		}
		w.mu.Unlock()
	}
	do("colors by version, and by logprob", holds(`new Set([...document.querySelectorAll('.token')].map(t => t.style.backgroundColor)).size === 2`),
		evaluate(`{const color = document.getElementById('color'); color.value = 'logprob'; color.dispatchEvent(new Event('change'))}`),
		holds(`new Set([...document.querySelectorAll('.token')].map(t => t.style.backgroundColor)).size > 4`))
	if *screenshot != "" {
		do("a token", chromedp.Focus(chromedp.CSS(".log")), chromedp.KeyEvent(kb.ArrowLeft), chromedp.KeyEvent(kb.ArrowLeft))
		png, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(*screenshot, png, 0o644); err != nil {
			t.Fatal(err)
		}
	}

	do("a version that no worker holds", evaluate(`{const v = document.querySelector('.version'); v.append(new Option('v99', 99)); v.value = 99}`),
		chromedp.SendKeys(message, "Again?"+kb.Enter),
		holds(`document.querySelector('.log .error') !== null`),
		holds(`document.querySelector('.log .error').innerText.includes('409')`))
}

// Escape ends a completion, and the worker stops.
func TestPlaygroundStopsACompletion(t *testing.T) {
	endless := &fakeWorker{model: "tiny", endless: true, aborted: make(chan struct{})}
	s, _ := serve(t, gateway.Config{}, endless)
	ctx := browse(t)
	if err := chromedp.Do(ctx, chromedp.Navigate(s.URL()+"/"), holds(`document.querySelector('.model').value === 'tiny'`),
		chromedp.SendKeys(message, "Count."+kb.Enter), holds(`document.querySelectorAll('.token').length > 0`),
		chromedp.KeyEvent(kb.Escape), holds(`document.querySelector('.log').innerText.includes('stopped') && !document.getElementById('send').disabled`)); err != nil {
		t.Fatal(err)
	}
	select {
	case <-endless.aborted:
	case <-time.After(time.Minute):
		t.Error("the worker was not stopped")
	}
}
