package crashtest

import (
	"encoding/xml"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// BucketFolder is the folder of a Tree with the objects of a bucket.
const BucketFolder = "bucket"

// Bucket is a server with the part of S3's protocol that libs/blob/s3 uses. An object is created in
// one operation, also one that was uploaded in parts.
type Bucket struct {
	URL     string
	changed func(Op)

	mu      sync.Mutex
	objects map[string]object
	uploads map[string][][]byte // by upload
}

type object struct {
	data   []byte
	writer string // the metadata of the one that created it
}

const writerHeader = "X-Amz-Meta-Rollout-Writer"

// NewBucket starts a server with objects, by their keys, and reports changes of them.
func NewBucket(t *testing.T, objects map[string][]byte, changed func(Op)) *Bucket {
	t.Helper()
	b := &Bucket{changed: changed, objects: map[string]object{}, uploads: map[string][][]byte{}}
	for key, data := range objects {
		b.objects[key] = object{data: data}
	}
	server := httptest.NewServer(b)
	t.Cleanup(server.Close)
	b.URL = server.URL
	return b
}

// Keys returns the keys of the objects.
func (b *Bucket) Keys() (keys []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key := range b.objects {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// ServeHTTP implements http.Handler.
func (b *Bucket) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil || r.ContentLength >= 0 && int64(len(body)) != r.ContentLength {
		return // the connection was cut
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	_, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	query := r.URL.Query()
	upload := query.Get("uploadId")
	switch found, exists := b.objects[key]; {
	case r.Method == http.MethodPost && query.Has("uploads"):
		id := fmt.Sprint("upload-", len(b.uploads), "-", r.Header.Get(writerHeader))
		b.uploads[id] = nil
		b.answer(w, struct {
			XMLName  xml.Name `xml:"InitiateMultipartUploadResult"`
			UploadID string   `xml:"UploadId"`
		}{UploadID: id})
	case r.Method == http.MethodPut && upload != "":
		var number int
		_, _ = fmt.Sscan(query.Get("partNumber"), &number)
		for len(b.uploads[upload]) < number {
			b.uploads[upload] = append(b.uploads[upload], nil)
		}
		b.uploads[upload][number-1] = body
		w.Header().Set("ETag", fmt.Sprintf("%q", query.Get("partNumber")))
	case r.Method == http.MethodDelete && upload != "":
		delete(b.uploads, upload)
		w.WriteHeader(http.StatusNoContent)
	case r.Method == http.MethodDelete:
		delete(b.objects, key)
		b.changed(Op{Kind: Remove, Path: BucketFolder + "/" + key})
		w.WriteHeader(http.StatusNoContent)
	case (r.Method == http.MethodPut || r.Method == http.MethodPost) && exists && r.Header.Get("If-None-Match") == "*":
		b.refuse(w, http.StatusPreconditionFailed, "PreconditionFailed")
	case r.Method == http.MethodPost:
		_, writer, _ := strings.Cut(strings.TrimPrefix(upload, "upload-"), "-")
		b.create(key, object{slices.Concat(b.uploads[upload]...), writer})
		delete(b.uploads, upload)
		b.answer(w, struct {
			XMLName xml.Name `xml:"CompleteMultipartUploadResult"`
			Key     string   `xml:"Key"`
		}{Key: key})
	case r.Method == http.MethodPut:
		b.create(key, object{body, r.Header.Get(writerHeader)})
	case !exists:
		b.refuse(w, http.StatusNotFound, "NoSuchKey")
	default:
		w.Header().Set("ETag", `"one"`)
		w.Header().Set(writerHeader, found.writer)
		http.ServeContent(w, r, "", time.Unix(1, 0), strings.NewReader(string(found.data)))
	}
}

func (b *Bucket) create(key string, o object) {
	b.objects[key] = o
	path := BucketFolder + "/" + key
	b.changed(Op{Kind: Create, Path: path, Data: o.data})
}

func (b *Bucket) answer(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/xml")
	_ = xml.NewEncoder(w).Encode(value) // the connection was cut
}

func (b *Bucket) refuse(w http.ResponseWriter, status int, code string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	_ = xml.NewEncoder(w).Encode(struct {
		XMLName xml.Name `xml:"Error"`
		Code    string
	}{Code: code})
}
